"""From what a caller writes to token ids: chat templates that refuse, and the token that begins a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from labcore import LLM, SamplingParams
from labcore.cli.main import main
from labcore.models import from_model
from labcore.viz.engine_control import EngineControl

ONE = SamplingParams(temperature=0, max_tokens=1)
USER = {"role": "user", "content": "a b"}
TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
REFUSALS = {
    "system": ("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS),
    "turns": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + TURNS
    ),
    "undefined": "{{ messages[0].content + missing.part }}",
    "broken": "{% for m in messages %}{{ m.content }",
    "types": "{{ messages[0].content + 1 }}",
    "arithmetic": "{{ 1 // 0 }}",
}
CONVERSATIONS = {"system": [{"role": "system", "content": "a"}, USER], "turns": [USER, USER]}


def tokenizer(begin: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    """A word a token; with `begin` it puts <s> in front of a text and </s> behind it."""
    words = ["<s>", "</s>", "?", "a", "b", "user", "assistant", "system"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if begin:
        made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="?")
    made.chat_template = template
    return made


def llm(record: bool = False, **options) -> LLM:
    return LLM(replace(from_model(tiny("llama")), tokenizer=tokenizer(**options)), num_blocks=16, record=record)


def asked(engine: LLM, prompt: str) -> list[int]:
    return engine.generate(prompt, ONE)[0].prompt_token_ids


@pytest.mark.parametrize("name", REFUSALS)
def test_chat_template_that_refuses_or_breaks_is_a_value_error_with_its_words(name):
    """Case: jinja2's TemplateError reached the caller."""
    engine = llm(template=REFUSALS[name])
    with pytest.raises(ValueError, match=r"messages can't be put into this model's chat template \(\w+: .+\) — ") as error:
        engine.chat(CONVERSATIONS.get(name, [USER]), ONE)
    assert "\n" not in str(error.value)
    if name in CONVERSATIONS:
        assert "System role not supported" in str(error.value) or "Roles must alternate" in str(error.value)
        engine.chat([USER], ONE)
    assert not engine.engine.has_unfinished_requests()


def test_chat_template_that_refuses_is_one_line_on_the_command_line(tmp_path: Path, capsys):
    """Case: 36 lines of traceback."""
    tiny("llama").save_pretrained(tmp_path)
    tokenizer(template=REFUSALS["system"]).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["generate", "a", "--chat", "--system", "b", "--max-tokens", "1", "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "System role not supported" in err


@pytest.mark.parametrize(
    "prompt, tokens",
    [
        ("a b", [0, 3, 4, 1]),
        ("<s> a b", [0, 3, 4, 1]),
        ("<s>", [0, 1]),
        ("<s> <s> a", [0, 0, 3, 1]),
        ("a <s> <s>", [0, 3, 0, 0, 1]),
    ],
)
def test_bos_in_front_of_a_text_is_not_doubled(prompt, tokens):
    """Case: a text that a chat template had made, given to generate(), had two."""
    engine = llm()
    assert asked(engine, prompt) == tokens
    assert engine.prompt_tokens(prompt) == tokens


@pytest.mark.parametrize("prompt, tokens", [("a b", [3, 4]), ("<s> a", [0, 3]), ("<s> <s> a", [0, 0, 3])])
def test_bos_is_as_written_where_the_tokenizer_adds_none(prompt, tokens):
    assert asked(llm(begin=False), prompt) == tokens


@pytest.mark.parametrize("template", ["{{ bos_token }} " + TURNS, TURNS])
def test_bos_of_a_chat_is_the_templates(template):
    """A template writes it or means to have none; generate() of the same text has the one that the tokenizer adds."""
    engine = llm(template=template)
    tokens = engine.chat([USER], ONE)[0].prompt_token_ids
    assert tokens == ([0] if "bos" in template else []) + [5, 3, 4]
    text = engine.tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert asked(engine, text) == [0, 5, 3, 4, 1]


def test_bos_is_not_doubled_on_the_command_line_nor_in_the_explorer(tmp_path: Path, capsys):
    tiny("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert main(["generate", "<s> a", "--max-tokens", "1", "--json", "--model", str(tmp_path)]) == 0
    assert '"prompt_token_ids": [\n        0,\n        3,\n        1\n      ]' in capsys.readouterr().out
    session = EngineControl(llm(record=True))
    name = session.submit("<s> a", max_tokens=1)
    assert session.engine.abort(name).prompt_token_ids == [0, 3, 1]


def test_prompt_of_a_model_without_a_tokenizer_is_refused_on_the_command_line(tmp_path: Path, capsys):
    """Case: AttributeError, with a traceback."""
    tiny("llama").save_pretrained(tmp_path)
    assert main(["generate", "a", "--model", str(tmp_path)]) == 2
    assert "this model has no tokenizer" in capsys.readouterr().err
