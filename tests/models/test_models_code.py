"""A model that brings Python code of its own: it runs when it was asked for by name, and at no other time."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils
from tiny_models import prompt, reference_greedy, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from labcore import LLM, SamplingParams
from labcore.cli.main import main
from labcore.models import ModelError, load

CODE = {
    "configuration_odd": "from transformers import LlamaConfig\nclass OddConfig(LlamaConfig):\n    model_type = 'odd'\n",
    "modeling_odd": (
        "from transformers import LlamaForCausalLM\nfrom .configuration_odd import OddConfig\n"
        "class OddForCausalLM(LlamaForCausalLM):\n    config_class = OddConfig\n"
    ),
    "tokenization_odd": (
        "from transformers import PreTrainedTokenizerFast\nclass OddTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    ),
}
CLASSES = {
    "AutoConfig": "configuration_odd.OddConfig",
    "AutoModelForCausalLM": "modeling_odd.OddForCausalLM",
    "AutoTokenizer": [None, "tokenization_odd.OddTokenizer"],
}


class CodedModel:
    """A tiny Llama with a tokenizer, of which some classes are said to be in Python files beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran = folder / "ran"
        tiny("llama").save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        for name, code in CODE.items():
            (folder / f"{name}.py").write_text(f"open({str(self.ran)!r}, 'a').write({name!r})\n{code}")

    def use(self, *auto_classes: str, model_type: str = "odd") -> None:
        self.change("config.json", model_type=model_type, auto_map={name: CLASSES[name] for name in auto_classes})
        if "AutoTokenizer" in auto_classes:
            auto_map = {"AutoTokenizer": CLASSES["AutoTokenizer"]}
            self.change("tokenizer_config.json", tokenizer_class="OddTokenizer", auto_map=auto_map)

    def change(self, file: str, **entries: object) -> None:
        path = self.folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodedModel:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # a test before this one left it, and it points into that test's folder
    return CodedModel(tmp_path / "model")


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input that says yes to whatever is asked."""
    stdin = io.StringIO("y\n" * 10)
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


@pytest.mark.parametrize("auto_classes", [["AutoConfig"], ["AutoConfig", "AutoModelForCausalLM"], list(CLASSES)])
def test_remote_code_is_refused_in_one_line_and_nothing_is_asked(coded, yes, auto_classes):
    """Case: transformers asked on standard output, read "y" from whatever was piped in, and ran the code."""
    coded.use(*auto_classes)
    with pytest.raises(ModelError, match="brings Python code of its own.*trust_remote_code=True") as error:
        LLM(coded.folder)
    assert "\n" not in str(error.value)
    assert yes.tell() == 0 and not coded.ran.exists()


@pytest.mark.parametrize("auto_classes", [["AutoModelForCausalLM"], ["AutoConfig", "AutoModelForCausalLM"]])
def test_remote_code_of_a_family_that_transformers_knows_is_left_alone(coded, yes, auto_classes):
    coded.use(*auto_classes, model_type="llama")
    assert type(load(coded.folder).model).__module__ == "transformers.models.llama.modeling_llama"
    assert yes.tell() == 0 and not coded.ran.exists()


def test_remote_code_of_a_tokenizer_alone_is_refused(coded, yes):
    coded.use("AutoTokenizer", model_type="llama")
    with pytest.raises(ModelError, match="brings Python code of its own"):
        load(coded.folder)
    assert yes.tell() == 0 and not coded.ran.exists()


def test_remote_code_on_the_command_line_is_one_line_and_nothing_is_asked(coded, yes, capsys):
    coded.use(*CLASSES)
    assert main(["generate", "w1", "--model", str(coded.folder)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "--trust-remote-code" in err
    assert yes.tell() == 0 and not coded.ran.exists()


def test_remote_code_runs_when_it_is_asked_for(coded, yes, capsys):
    coded.use(*CLASSES)
    llm = LLM(coded.folder, trust_remote_code=True)
    assert all(name in coded.ran.read_text() for name in CODE)
    assert type(llm.engine.loaded.model).__name__ == "OddForCausalLM" and type(llm.tokenizer).__name__ == "OddTokenizer"
    ids = prompt(9)
    expected = reference_greedy(tiny("llama"), ids, 6)
    assert llm.generate(ids, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids == expected
    assert main(["generate", "w1", "--max-tokens", "2", "--model", str(coded.folder), "--trust-remote-code"]) == 0
    assert yes.tell() == 0


def test_remote_code_that_ran_once_is_refused_the_next_time(coded, yes):
    coded.use(*CLASSES)
    load(coded.folder, trust_remote_code=True)
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load(coded.folder)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_remote_code_takes_true_or_false(coded, value):
    with pytest.raises(ValueError, match="trust_remote_code is .*; it must be True or False"):
        LLM(coded.folder, trust_remote_code=value)


@pytest.mark.parametrize(
    "named", ["flash_attention_2", "flash_attention_3", "someone/some-kernel", "kernels-community/flash-attn2", "eager", "?"]
)
@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_attention_that_a_config_names_is_not_asked_for(tmp_path, named, field):
    """Case: a config saved with flash_attention_2, where it isn't installed: "download the model again"."""
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: named}))
    llm = LLM(tmp_path)
    ids = prompt(9)
    expected = reference_greedy(tiny("llama"), ids, 6)
    assert llm.generate(ids, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids == expected


def test_experts_that_a_config_names_are_not_asked_for(tmp_path):
    tiny("gpt_oss").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"experts_implementation": "a-kernel"}))
    assert len(load(tmp_path).layers) == 4


def test_loading_names_a_package_that_a_model_needs_is_named_with_what_to_do(tmp_path):
    """Case: weights quantised for a package that is not installed: "its files may be damaged"."""
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(ModelError, match="ImportError.*— install the package that it asks for"):
        load(tmp_path)
