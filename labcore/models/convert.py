"""Convert a quantised GGUF file to a transformers model folder: `python -m labcore.models.convert FILE.gguf FOLDER`.

transformers dequantises GGUF on every load, 20 seconds for SmolLM2-135M, and can't save the result. So the weights are
copied to a new model, which is saved once and loads in two seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

MACHINE_KEYS = ("is_local", "local_files_only")  # where transformers read the tokenizer from


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights (float32 safetensors), generation config, tokenizer and chat template to `folder`."""
    source = {"gguf_file": gguf.name, "trust_remote_code": False}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = quantised.config
    del config.quantization_config
    model = type(quantised)(config).to(torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)

    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]  # of a turn, of a text
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "config.json", drop=("_name_or_path", "_model_name_or_path"))
    edit_json(folder / "tokenizer_config.json", drop=MACHINE_KEYS)


def edit_json(path: Path, drop: tuple[str, ...]) -> None:
    """Remove keys from a JSON file."""
    content = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in drop}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
