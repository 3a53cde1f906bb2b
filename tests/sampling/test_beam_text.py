"""The text of a beam search is the text that `generate` gives for the same tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_detokenizer import BYTES, PIECES, SPECIAL, byte_tokens, ids, sentencepiece_tokenizer
from tiny_models import prompt, tiny

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.engine.beams import BeamGroup
from labcore.models import LoadedModel, from_model
from labcore.models.token_decoder import TokenDecoder
from labcore.request import Request
from labcore.sampling.beam_search import Hypothesis


def text(token_ids: list[int], tokenizer=PIECES, reason: str = "length", said: str = "the") -> str:
    """The text that a search gives whose best hypothesis has these tokens, for the prompt `said`."""
    root = Request("r", ids(said, tokenizer), BeamSearchParams(), 0, 64, seed=0)
    search = SimpleNamespace(best=lambda: [Hypothesis(tuple(token_ids), -1.0, -1.0, reason)])
    return BeamGroup("r", root, search, TokenDecoder(tokenizer)).output().outputs[0].text


def piece(name: str) -> int:
    return PIECES.convert_tokens_to_ids(name)


def test_beam_text_keeps_the_space_between_prompt_and_output():
    """Case: 'fox the' for ' fox the', in sentencepiece."""
    assert text([piece("▁fox"), piece("▁the")]) == " fox the"


@pytest.mark.parametrize("end", ["\n", SPECIAL])
def test_beam_text_ends_before_the_end_token(end):
    """Case: an end token that the tokenizer doesn't call special was text."""
    token_ids = [piece("▁fox"), piece(end)]
    assert text(token_ids, reason="stop") == " fox"
    assert text(token_ids, reason="length") == (" fox\n" if end == "\n" else " fox"), "under ignore_eos it is a token like any"


def test_beam_text_shows_no_half_character():
    """Case: '😀\ufffd'."""
    assert text([*byte_tokens("😀"), *byte_tokens(b"\xf0\x9f")]) == "😀"
    assert text(ids("😀".encode() + b"\xf0\x9f"), BYTES) == "😀"
    assert text(ids("😀\ufffd"), BYTES) == "😀\ufffd"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return replace(from_model(tiny("llama")), tokenizer=PIECES)


def test_beam_text_is_the_text_of_generate(loaded):
    """One beam says what greedy sampling says, up to any length and with an end token that is no special one."""
    for seed in range(12):
        prompt_ids = prompt(6, seed)
        greedy = LLM(loaded).generate(prompt_ids, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
        llm = LLM(replace(loaded, eos_token_ids=(greedy.token_ids[8],)))
        expected = llm.generate(prompt_ids, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
        found = llm.beam_search(prompt_ids, BeamSearchParams(beam_width=1, max_tokens=12))[0].outputs[0]
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert found.text == expected.text


def test_special_stop_ends_a_request(loaded):
    tokens = LLM(loaded).generate(prompt(6), SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids
    tokenizer = sentencepiece_tokenizer()
    name = tokenizer.convert_ids_to_tokens(tokens[5])
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    llm = LLM(replace(loaded, tokenizer=tokenizer))
    output = llm.generate(prompt(6), SamplingParams(temperature=0, max_tokens=12, stop=name))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (tokens[: tokens.index(tokens[5]) + 1], "stop")
    with pytest.raises(ValueError, match="holds the special token"):
        llm.generate(prompt(6), SamplingParams(stop=name + "\n"))
    assert not llm.engine.has_unfinished_requests()
