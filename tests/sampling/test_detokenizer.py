"""Tokens to text: every way a character or a stop string can be cut, on tokenizers made here and on the real one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, PIECES, SPECIAL
from transformers import AutoTokenizer

from labcore.sampling.detokenizer import LONGEST_CHARACTER, REPLACEMENT, Detokenizer, StopStrings, TextStream
from labcore.sampling_params import SamplingParams

END = BYTES.convert_tokens_to_ids(SPECIAL)


def ids(text: str | bytes, tokenizer=BYTES) -> list[int]:
    """Token ids of a text; of bytes, one token a byte, whatever they mean."""
    if isinstance(text, str):
        return tokenizer.encode(text, add_special_tokens=False)
    byte_to_char = {byte: char for char, byte in _char_to_byte().items()}
    return tokenizer.convert_tokens_to_ids([byte_to_char[byte] for byte in text])


def _char_to_byte() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def steps(token_ids, tokenizer=BYTES, prompt=(), **params) -> list[str]:
    """The text after every token, and after finish()."""
    detokenizer = Detokenizer(tokenizer, list(prompt), SamplingParams(max_tokens=None, **params))
    texts = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        texts.append(detokenizer.text)
    detokenizer.finish()
    return [*texts, detokenizer.text]


def final(token_ids, **kw) -> str:
    return steps(token_ids, **kw)[-1]


def assert_only_grows(texts: list[str]) -> None:
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)


def assert_whole_but_for_half_a_character(text: str, whole: str) -> None:
    dropped = whole[len(text) :]
    assert whole == text + dropped
    assert set(dropped) <= {REPLACEMENT} and len(dropped) <= LONGEST_CHARACTER


# Characters of 1 to 4 bytes, combining marks, right-to-left, joined emoji, and the replacement character itself.
characters = st.text(
    st.sampled_from("ab \n:éß\u0301你好世界שלום\u200d👩🚀😀🏽\ufffd") | st.characters(exclude_categories=["Cs"])
)


class TestWholeCharacters:
    @given(characters)
    @example("\ufffd")
    @example("😀\ufffd")
    @example("👩🏽‍🚀 e\u0301 שלום 你好")
    def test_streamed_text_is_what_one_decode_gives(self, text):
        texts = steps(ids(text), prompt=ids("the fox"))
        assert texts[-1] == BYTES.decode(ids(text)) == text
        assert_only_grows(texts)

    @given(characters)
    def test_the_same_holds_when_every_byte_is_a_token_of_its_own(self, text):
        texts = steps(ids(text.encode()))
        assert texts[-1] == text or texts[-1] == text.rstrip(REPLACEMENT)
        assert_only_grows(texts)

    @given(characters)
    def test_a_sentencepiece_tokenizer_keeps_the_space_between_prompt_and_output(self, text):
        prompt, token_ids = ids("the fox", PIECES), ids(text, PIECES)
        texts = steps(token_ids, tokenizer=PIECES, prompt=prompt)
        whole = PIECES.decode(prompt + token_ids)
        assert "the fox" + texts[-1] == whole
        assert_only_grows(texts)

    @given(st.lists(st.integers(0, len(BYTES) - 1), max_size=60))
    def test_any_tokens_at_all_stream_to_what_one_decode_gives_but_for_half_a_character_at_the_end(self, token_ids):
        texts = steps(token_ids)
        whole = BYTES.decode(token_ids, skip_special_tokens=True)
        assert_whole_but_for_half_a_character(texts[-1], whole)
        assert_only_grows(texts)

    @given(st.lists(st.sampled_from([0x80, 0x98, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF, 0x61]), max_size=80).map(bytes))
    @settings(max_examples=300)
    def test_long_runs_of_broken_bytes_do_too(self, junk):
        texts = steps(ids(junk))
        whole = junk.decode(errors="replace")
        assert_whole_but_for_half_a_character(texts[-1], whole)
        assert_only_grows(texts)

    @given(characters)
    def test_a_character_is_shown_only_when_its_last_byte_is_there(self, text):
        data = text.encode()
        for count, shown in enumerate(steps(ids(data))[:-1], start=1):
            assert data[:count].decode(errors="ignore").startswith(shown)

    def test_an_emoji_appears_with_its_last_byte(self):
        assert steps(ids("a😀b".encode())) == ["a", "a", "a", "a", "a😀", "a😀b", "a😀b"]

    def test_half_a_character_at_the_end_is_not_shown(self):
        for cut in (1, 2, 3):
            assert final(ids("ab😀".encode()[: 2 + cut])) == "ab"

    def test_a_replacement_character_that_the_model_wrote_is_shown_at_the_end(self):
        assert final(ids("ab\ufffd")) == "ab\ufffd"

    def test_special_tokens_give_no_text_even_inside_a_character(self):
        first, *rest = ids("😀".encode())
        assert final([END, first, END, *rest, END, *ids("!"), END]) == "😀!"

    def test_ids_that_the_tokenizer_does_not_know_give_no_text(self):
        assert final([*ids("ab"), 10_000, *[10_001] * 50, *ids("c")]) == "abc"

    def test_nothing_at_all_is_the_empty_text(self):
        assert steps([]) == [""]

    def test_finishing_twice_adds_nothing(self):
        detokenizer = Detokenizer(BYTES, ids("the"), SamplingParams(stop="fox!"))
        for token_id in ids(" fox"):
            detokenizer.append(token_id)
        detokenizer.finish()
        detokenizer.finish()
        assert detokenizer.text == " fox"


class TestSentencepiece:
    def test_the_first_space_of_a_text_without_prompt_text_is_dropped_as_in_one_decode(self):
        token_ids = [PIECES.convert_tokens_to_ids(piece) for piece in ("▁the", "▁fox")]
        assert final(token_ids, tokenizer=PIECES) == "the fox" == PIECES.decode(token_ids)

    def test_an_output_that_begins_with_a_bare_space_keeps_its_later_spaces(self):
        token_ids = [PIECES.convert_tokens_to_ids(piece) for piece in ("▁", "▁", "a")]
        assert final(token_ids, tokenizer=PIECES) == " a" == PIECES.decode(token_ids)

    def test_byte_fallback_characters_appear_whole_one_after_the_other(self):
        token_ids = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€😀".encode()]
        assert steps(token_ids, tokenizer=PIECES, prompt=ids("the", PIECES)) == [
            "", "", "€", "€", "€", "€", "€😀", "€😀"
        ]  # fmt: skip

    def test_half_a_byte_fallback_character_at_the_end_is_not_shown(self):
        token_ids = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€😀".encode()[:-1]]
        assert final(token_ids, tokenizer=PIECES, prompt=ids("the", PIECES)) == "€"


class TestPromptThatEndsInsideACharacter:
    """A prompt of token ids may end anywhere. Nothing of it may leak into the answer."""

    secret = "system: the password is swordfish "

    @pytest.mark.parametrize("missing", [1, 2, 3])
    def test_the_character_appears_once_when_the_output_completes_it(self, missing):
        whole = "😀".encode()
        prompt = ids(self.secret) + ids(whole[:-missing])
        assert final(ids(whole[-missing:]) + ids("!"), prompt=prompt) == "😀!"

    @pytest.mark.parametrize("missing", [1, 2, 3])
    def test_nothing_of_it_appears_when_the_output_goes_on_otherwise(self, missing):
        prompt = ids(self.secret) + ids("😀".encode()[:-missing])
        assert final(ids("ab"), prompt=prompt) == "ab"
        assert final(ids("€"), prompt=prompt) == "€"
        assert final([], prompt=prompt) == ""

    def test_a_prompt_of_half_a_character_and_nothing_else(self):
        assert final(ids(b"\x82\xac"), prompt=ids(b"\xe2")) == "€"
        assert final(ids("x"), prompt=ids(b"\xe2\x82")) == "x"

    @pytest.mark.parametrize("tail", ["\ufffd", "\ufffd" * 30, "€\ufffd"])
    def test_replacement_characters_at_the_end_of_the_prompt_stay_there(self, tail):
        assert final(ids("ok"), prompt=ids("the " + tail)) == "ok"
        assert final(ids("\ufffdok"), prompt=ids("the " + tail)) == "\ufffdok"

    def test_broken_bytes_at_the_end_of_the_prompt_stay_there(self):
        for junk in (b"\x80", b"\x80" * 5, b"\x80" * 40, b"\xff\xfe\xe2"):
            assert final(ids("ok"), prompt=ids(self.secret) + ids(junk)) == "ok"

    def test_byte_fallback_completes_across_the_border_too(self):
        prompt = ids("the", PIECES) + [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"\xe2\x82\xac\xe2"]
        rest = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"\x82\xac"]
        assert final(rest, tokenizer=PIECES, prompt=prompt) == "€"
        assert final(ids("fox", PIECES)[1:], tokenizer=PIECES, prompt=prompt) == "fox"

    @given(characters, st.integers(0, 40), characters)
    def test_no_piece_of_the_prompt_is_in_the_output_wherever_it_is_cut(self, before, cut, after):
        whole = (before + "the 😀 fox" + after).encode()
        cut = min(cut, len(whole))
        prompt, output = ids(whole[:cut]), ids(whole[cut:])
        shown = final(output, prompt=prompt)
        # What the output must be: all characters that end in it.
        start = len(whole[:cut].decode(errors="ignore"))
        expected = whole.decode()[start:]
        if REPLACEMENT not in whole.decode():
            assert shown == expected

    def test_a_prompt_of_special_tokens_alone_is_no_context(self):
        assert final(ids("the fox"), prompt=[END] * 20) == "the fox"


# text pieces as they come, stop strings, what must be shown after each piece and at the end, and what was hit
SCRIPTS = [
    (["a\nUser", ":"], ["\nUser:"], ["a", "a"], "a", "\nUser:"),
    (["a\nUser", " said"], ["\nUser:"], ["a", "a\nUser said"], "a\nUser said", None),
    (["br", "own", " f", "ox"], ["own fox"], ["br", "br", "br", "br"], "br", "own fox"),
    (["br", "own", " f", "og"], ["own fox"], ["br", "br", "br", "brown fog"], "brown fog", None),
    (["a\nUs"], ["\nUser:"], ["a"], "a\nUs", None),
    (["ab", "ab", "ac"], ["abac"], ["", "ab", "ab"], "ab", "abac"),
    (["aa", "aa", "b"], ["aab"], ["", "aa", "aa"], "aa", "aab"),
    (["xSTOPy"], ["STOP"], ["x"], "x", "STOP"),
    (["STOP"], ["STOP"], [""], "", "STOP"),
    (["S", "T", "O", "P"], ["STOP"], [""] * 4, "", "STOP"),
    (["S", "T", "O", "x"], ["STOP"], ["", "", "", "STOx"], "STOx", None),
    (["one END two STOP"], ["STOP", "END"], ["one "], "one ", "END"),
    (["xabc"], ["bc", "abc"], ["x"], "x", "abc"),
    (["xab", "cd"], ["abcd", "bc"], ["x", "xa"], "xa", "bc"),
    (["xabcd"], ["abcd", "bc"], ["xa"], "xa", "bc"),
    (["x", "\n", "\n"], ["\n\n"], ["x", "x", "x"], "x", "\n\n"),
    (["x", "\n", "y"], ["\n\n"], ["x", "x", "x\ny"], "x\ny", None),
    (["a", "😀", "b"], ["😀"], ["a", "a"], "a", "😀"),
    (["aba"], ["a"], [""], "", "a"),
    (["User"], ["User:", "Used"], [""], "User", None),
    (["Use", "d"], ["User:", "Used"], ["", ""], "", "Used"),
    (["a", "b"], ["c" * 30], ["a", "ab"], "ab", None),
    (["c" * 20, "c" * 9], ["c" * 30], ["", ""], "c" * 29, None),
    (["c" * 20, "c" * 19], ["c" * 30], ["", ""], "", "c" * 30),
]


class TestStopStrings:
    @pytest.mark.parametrize(("pieces", "stops", "shown", "end", "hit"), SCRIPTS)
    def test_scripted_pieces_show_exactly_what_they_may(self, pieces, stops, shown, end, hit):
        matcher, text, texts = StopStrings(stops), "", []
        for piece in pieces:
            text += matcher.append(piece)
            texts.append(text)
            if matcher.hit is not None:
                break
        assert texts == shown
        assert text + matcher.finish() == end
        assert matcher.hit == hit

    @given(
        st.text("ab", max_size=24),
        st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
        st.lists(st.integers(1, 6), min_size=24, max_size=24),
    )
    @settings(max_examples=300)
    def test_the_result_is_that_of_looking_after_every_character_however_the_text_is_cut(self, text, stops, cuts):
        expected, expected_hit = text, None
        for end in range(1, len(text) + 1):
            hits = [stop for stop in stops if text[:end].endswith(stop)]
            if hits:
                expected_hit = max(hits, key=len)
                expected = text[: end - len(expected_hit)]
                break
        matcher, shown, at, longest = StopStrings(stops), "", 0, max(map(len, stops))
        for size in cuts:
            shown += matcher.append(text[at : at + size])
            at += size
            assert expected.startswith(shown)
            if matcher.hit is not None:
                break
            assert len(text[:at]) - len(shown) < longest
        assert shown + matcher.finish() == expected
        assert matcher.hit == expected_hit

    def test_a_stop_string_in_the_prompt_or_begun_in_it_does_not_count(self):
        assert final(ids("P yes"), prompt=ids("the STOP, STO"), stop="STOP") == "P yes"

    def test_a_stop_string_with_characters_of_several_tokens_is_found(self):
        texts = steps(ids("ab😀cd".encode()), stop="b😀c")
        assert texts == ["a"] * len(texts)

    def test_tokens_after_the_stop_are_ignored(self):
        assert final(ids("abc STOP def STOP"), stop=" STOP") == "abc"

    def test_a_hit_is_reported_once_it_is_complete(self):
        detokenizer = Detokenizer(BYTES, ids("the"), SamplingParams(stop=["ox", "zz"]))
        for token_id in ids(b"fo"):
            detokenizer.append(token_id)
            assert detokenizer.stop_hit is None
        detokenizer.append(*ids(b"x"))
        assert detokenizer.stop_hit == "ox" and detokenizer.text == "f"

    def test_held_text_is_shown_when_the_end_comes_first(self):
        assert steps(ids(b"ab\nUs"), stop="\nUser:")[-2:] == ["ab", "ab\nUs"]


class TestMinTokens:
    def test_a_stop_string_that_is_complete_too_early_is_text(self):
        assert final(ids(b"STOPabSTOPc"), stop="STOP", min_tokens=5) == "STOPab"

    def test_a_stop_string_complete_at_token_min_tokens_counts(self):
        assert final(ids(b"abcSTOP"), stop="STOP", min_tokens=7) == "abc"
        assert final(ids(b"abcSTOPd"), stop="STOP", min_tokens=8) == "abcSTOPd"

    def test_one_that_begins_before_and_ends_after_is_cut_off_whole(self):
        assert final(ids(b"abSTOP"), stop="STOP", min_tokens=5) == "ab"

    def test_an_early_one_inside_a_longer_candidate_is_not_found_later(self):
        assert final(ids(b"xabcz"), stop=["bc", "abcd"], min_tokens=5) == "xabcz"

    def test_text_shown_before_min_tokens_only_grows(self):
        texts = steps(ids(b"STOSTOP STOP"), stop="STOP", min_tokens=9)
        assert_only_grows(texts)
        assert texts[-1] == "STOSTOP "


class TestFork:
    """A fork has taken in what its parent has, and from there on neither knows of the other."""

    beginning = st.lists(st.sampled_from([*ids("ab "), *ids("€😀".encode())]), max_size=12)

    @given(beginning, beginning, beginning, st.sampled_from([None, "ab", ("b a", "€")]))
    @example(ids("x a"), ids("b"), ids("a"), "ab")  # each side holds an open end back when the fork comes
    @example(ids("😀".encode()[:2]), ids("😀".encode()[2:]), ids("a"), None)  # half a character
    def test_parent_and_child_say_what_each_would_have_said_alone(self, said, ours, theirs, stop):
        parent = Detokenizer(BYTES, ids("the"), SamplingParams(stop=stop))
        for token_id in said:
            parent.append(token_id)
        child = parent.fork()
        assert child.text == parent.text and child.stop_hit == parent.stop_hit
        for place in range(max(len(ours), len(theirs))):  # in turn, as in a batch
            for side, rest in ((parent, ours), (child, theirs)):
                if place < len(rest):
                    side.append(rest[place])
        for side, rest in ((parent, ours), (child, theirs)):
            side.finish()
            assert side.text == final([*said, *rest], prompt=ids("the"), stop=stop)

    def test_a_model_without_a_tokenizer_is_forked_too(self):
        child = Detokenizer(None, [1], SamplingParams()).fork()
        child.append(2)
        assert child.text == ""


class TestNoTokenizer:
    def test_text_stays_empty(self):
        assert steps([1, 2, 3], tokenizer=None) == ["", "", "", ""]

    def test_stop_strings_are_refused_because_there_is_no_text_to_search(self):
        with pytest.raises(ValueError, match=r"^stop is \('x',\); it must be None .* use stop_token_ids\.$"):
            Detokenizer(None, [1], SamplingParams(stop="x"))


class Counting:
    """A tokenizer that counts the tokens it was asked to decode."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.encode = tokenizer.encode

    def decode(self, token_ids, **kw):
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **kw)


@pytest.mark.parametrize(
    "piece", ["the fox ", "😀", "你好", "\ufffd", "e\u0301", b"\x80", b"\xff\xe2", [END], [10_000]], ids=repr
)
def test_the_work_for_a_token_does_not_grow_with_the_text(piece):
    token_ids = (piece if isinstance(piece, list) else ids(piece)) * 400
    counting = Counting(BYTES)
    stream = TextStream(counting, ids("the"))
    for token_id in token_ids:
        stream.append(token_id)
    stream.finish()
    assert counting.decoded <= 5 * LONGEST_CHARACTER * len(token_ids)


def test_a_long_prompt_costs_no_more_than_a_short_one():
    counting = Counting(BYTES)
    TextStream(counting, ids("the fox ") * 2000)
    assert counting.decoded < 100


@pytest.fixture(scope="module")
def real(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


class TestRealTokenizer:
    @given(text=characters)
    @settings(max_examples=150, deadline=None)
    def test_streamed_text_is_what_one_decode_gives(self, real, text):
        token_ids = ids(text, real)
        assume(real.decode(token_ids) == text)  # its vocabulary lacks some bytes of characters that nobody has assigned
        texts = steps(token_ids, tokenizer=real, prompt=ids("Once upon", real))
        assert texts[-1] == text
        assert_only_grows(texts)

    @given(token_ids=st.lists(st.integers(0, 49_151), max_size=40))
    @settings(max_examples=150, deadline=None)
    def test_any_tokens_at_all_do_but_for_half_a_character_at_the_end(self, real, token_ids):
        texts = steps(token_ids, tokenizer=real)
        whole = real.decode(token_ids, skip_special_tokens=True)
        assert_whole_but_for_half_a_character(texts[-1], whole)
        assert_only_grows(texts)

    @given(
        text=st.text("ab \n:Userfox😀", min_size=1, max_size=40), stop=st.text("ab \n:fox😀", min_size=1, max_size=4)
    )
    @settings(max_examples=150, deadline=None)
    @example(text="two foxes 😀😀", stop="😀")
    def test_a_stop_string_cuts_the_text_at_its_first_appearance(self, real, text, stop):
        texts = steps(ids(text, real), tokenizer=real, stop=stop)
        assert texts[-1] == text.partition(stop)[0]
        assert_only_grows(texts)

    def test_a_chat_prompt_gives_no_text(self, real):
        prompt = real.apply_chat_template([{"role": "user", "content": "Hi 😀"}], add_generation_prompt=True)
        prompt = prompt["input_ids"] if not isinstance(prompt, list) else prompt
        token_ids = ids("Hello there! 😀", real) + [real.eos_token_id]
        assert final(token_ids, tokenizer=real, prompt=prompt) == "Hello there! 😀"


def test_the_detokenizer_reads_only_stop_and_min_tokens_of_the_params():
    detokenizer = Detokenizer(BYTES, ids("the"), SimpleNamespace(stop=("x",), min_tokens=0))
    detokenizer.append(*ids(b"x"))
    assert detokenizer.stop_hit == "x"
