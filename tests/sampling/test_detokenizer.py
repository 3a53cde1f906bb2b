"""Tokens to text: every way a character or a stop string can be cut, on tokenizers made here and on the real one."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, PIECES, SPECIAL, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from labcore.models.token_decoder import TokenDecoder
from labcore.sampling.detokenizer import Detokenizer
from labcore.sampling.stop_strings import StopStrings
from labcore.sampling.text_stream import LONGEST_CHARACTER, REPLACEMENT, TextStream
from labcore.sampling_params import SamplingParams


def first_space_kept_tokenizer() -> PreTrainedTokenizerFast:
    """Like Gemma's: sentencepiece with byte fallback, without a space in front of a text."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like T5's and newer Llama-2's: the first ▁ of a text is dropped, token by token."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")]
    )
    return tokenizer


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """Like BERT's: ## goes on with a word, all other tokens begin one, and spaces before signs are cleaned up."""
    pieces = ["[UNK]", SPECIAL, *"abc.,!?'", "the", "fox", "n't", "'s", *("##" + end for end in "abcxyz"), "##ing", "é", "##é"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=True)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


ALL = {
    "byte-level": BYTES,
    "sentencepiece": PIECES,
    "first space kept": first_space_kept_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "WordPiece": wordpiece_tokenizer(),
}
END = BYTES.convert_tokens_to_ids(SPECIAL)


def ids(text: str | bytes, tokenizer=BYTES) -> list[int]:
    """Token ids of a text; of bytes, one token a byte, whatever they mean."""
    if isinstance(text, str):
        return tokenizer.encode(text, add_special_tokens=False)
    byte_to_char = {byte: char for char, byte in _char_to_byte().items()}
    return tokenizer.convert_tokens_to_ids([byte_to_char[byte] for byte in text])


def byte_tokens(text: str | bytes) -> list[int]:
    """Ids of the byte tokens of a sentencepiece tokenizer that spell these bytes."""
    data = text.encode() if isinstance(text, str) else text
    return PIECES.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


def is_half(data: bytes) -> bool:
    """Whether these bytes are the beginning of one character; Python takes that of a lone surrogate for one, too."""
    if len(data) == 2 and data[0] == 0xED and data[1] >= 0xA0:
        return data[1] <= 0xBF
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


def _char_to_byte() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def steps(token_ids, tokenizer=BYTES, prompt=(), **params) -> list[str]:
    """The text after every token, and after finish()."""
    decoder = None if tokenizer is None else TokenDecoder(tokenizer)
    detokenizer = Detokenizer(decoder, list(prompt), SamplingParams(max_tokens=None, **params))
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
        detokenizer = Detokenizer(TokenDecoder(BYTES), ids("the"), SamplingParams(stop="fox!"))
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

    def test_byte_tokens_appear_with_the_end_of_their_run(self):
        token_ids = [*byte_tokens("€😀"), PIECES.convert_tokens_to_ids("a")]
        assert steps(token_ids, tokenizer=PIECES, prompt=ids("the", PIECES)) == [*[""] * 7, "€😀a", "€😀a"]
        assert final(token_ids[:-1], tokenizer=PIECES, prompt=ids("the", PIECES)) == "€😀"

    def test_stray_byte_takes_back_the_characters_of_its_run_before_they_are_shown(self):
        """Case: 你, a lone E2 and a: 你 was on the screen when the decoder made three replacement characters of it."""
        token_ids = [*byte_tokens("你"), *byte_tokens(b"\xe2"), PIECES.convert_tokens_to_ids("a")]
        assert final(token_ids, tokenizer=PIECES, prompt=ids("the", PIECES)) == "\ufffd" * 4 + "a"
        assert final(token_ids[:-1], tokenizer=PIECES, prompt=ids("the", PIECES)) == "你", "the end of a character is missing"

    def test_stray_bytes_at_the_end_take_no_text_with_them(self):
        """Case: of é behind a stray byte, nothing was left."""
        token_ids = [PIECES.convert_tokens_to_ids("a"), *byte_tokens(b"\xe2" + "é".encode())]
        assert final(token_ids, tokenizer=PIECES) == "a" + "\ufffd" * 3

    def test_stop_string_in_a_run_of_bytes_is_found_with_its_last_byte(self):
        newline, more = byte_tokens("\n\n"), byte_tokens("x")
        detokenizer = Detokenizer(TokenDecoder(PIECES), ids("the", PIECES), SamplingParams(stop="\n"))
        detokenizer.append(PIECES.convert_tokens_to_ids("a"))
        detokenizer.append(newline[0])
        assert (detokenizer.stop_hit, detokenizer.text) == ("\n", "a")
        assert final([*newline, *more], tokenizer=PIECES, stop="\nx") == "\n"
        assert final([*newline, *more], tokenizer=PIECES, stop="x", min_tokens=4) == "\n\nx"

    def test_long_run_of_bytes_costs_no_more_a_token_than_a_short_one(self):
        counting = Counting(PIECES)
        counting.convert_tokens_to_ids, counting.unk_token_id = PIECES.convert_tokens_to_ids, PIECES.unk_token_id
        stream = TextStream(TokenDecoder(counting), ids("the", PIECES))
        for token_id in byte_tokens("你" * 1000):
            stream.append(token_id)
        assert stream.finish() == "你" * 1000
        assert counting.decoded < 5 * 3000

    def test_half_a_byte_fallback_character_at_the_end_is_not_shown(self):
        token_ids = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€😀".encode()[:-1]]
        assert final(token_ids, tokenizer=PIECES, prompt=ids("the", PIECES)) == "€"


def mixes(tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens at all, and more often than by chance whole characters, halves of them and stray bytes."""
    pieces = [st.integers(0, len(tokenizer) - 1).map(lambda i: [i])]
    texts = ["a", " the", "你", "😀", "é", "\n", "\ufffd"]
    pieces.append(st.sampled_from(texts).map(lambda text: ids(text, tokenizer)))
    broken = ["你".encode(), "😀".encode()[:2], b"\xe2", b"\x80", "é".encode(), "\ufffd".encode(), b"\n"]
    if tokenizer is BYTES:
        pieces.append(st.sampled_from(broken).map(ids))
    elif TokenDecoder(tokenizer).byte_tokens:
        pieces.append(st.sampled_from(broken).map(byte_tokens))
    return st.lists(st.one_of(pieces), max_size=10).map(lambda runs: [i for run in runs for i in run])


class TestAllAtOnce:
    """Streamed text is what decoding all tokens at once gives, but for half a character at the end."""

    def allowed(self, decoder: TokenDecoder, prompt: list[int], token_ids: list[int]) -> list[str]:
        """The text decoded at once, and without half a character: up to 3 byte tokens, or 1 replacement character."""
        before = len(decoder.decode(prompt))
        spoken = [token_id for token_id in token_ids if token_id not in decoder.special_ids]
        whole = decoder.decode(prompt + spoken)[before:]
        texts = [whole]
        if spoken and spoken[-1] in decoder.byte_tokens:
            run = bytes(decoder.byte_tokens.get(token_id, 0x20) for token_id in spoken)
            cuts = [len(spoken) - size for size in (1, 2, 3) if is_half(run[-size:])]
            texts = [decoder.decode(prompt + spoken[:cut])[before:] for cut in cuts] or [whole]
        elif whole.endswith(REPLACEMENT):
            texts.append(whole[:-1])
        return texts

    @pytest.mark.parametrize("name", ALL)
    @given(st.data())
    @settings(max_examples=150)
    def test_streamed_text_of_any_mix_of_tokens_is_what_one_decode_gives(self, name, data):
        """Case: of 1,500 mixes of characters and stray bytes, 402 were another text in sentencepiece."""
        tokenizer = ALL[name]
        token_ids, prompt = data.draw(mixes(tokenizer)), data.draw(st.sampled_from([[], ids("the fox", tokenizer)]))
        texts = steps(token_ids, tokenizer=tokenizer, prompt=prompt)
        assert texts[-1] in self.allowed(TokenDecoder(tokenizer), prompt, token_ids)
        assert_only_grows(texts)

    @pytest.mark.parametrize("name", ALL)
    @given(st.data())
    @settings(max_examples=60)
    def test_text_of_all_tokens_in_one_go_is_the_streamed_text(self, name, data):
        tokenizer = ALL[name]
        token_ids, prompt = data.draw(mixes(tokenizer)), data.draw(st.sampled_from([[], ids("the fox", tokenizer)]))
        stream = TextStream(TokenDecoder(tokenizer), prompt)
        assert stream.text_of(token_ids) == final(token_ids, tokenizer=tokenizer, prompt=prompt)
        assert stream.text_of(token_ids) == stream.text_of(token_ids), "nothing changed"


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
        detokenizer = Detokenizer(TokenDecoder(BYTES), ids("the"), SamplingParams(stop=["ox", "zz"]))
        for token_id in ids(b"fo"):
            detokenizer.append(token_id)
            assert detokenizer.stop_hit is None
        detokenizer.append(*ids(b"x"))
        assert detokenizer.stop_hit == "ox" and detokenizer.text == "f"

    def test_held_text_is_shown_when_the_end_comes_first(self):
        assert steps(ids(b"ab\nUs"), stop="\nUser:")[-2:] == ["ab", "ab\nUs"]


class TestSpecialStop:
    """A stop string that names a special token. The token gives no text, so no search in the text could find it."""

    def test_special_stop_ends_the_text_where_the_token_comes(self):
        """Case: stop=["<|im_end|>"] ran to max_tokens in silence."""
        detokenizer = Detokenizer(TokenDecoder(BYTES), ids("the"), SamplingParams(stop=["zz", SPECIAL]))
        for token_id in [*ids(" fox"), END, *ids(" jumps")]:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.stop_hit) == (" fox", SPECIAL)

    def test_special_stop_shows_what_was_held_back_but_no_half_character(self):
        assert final([*ids("a\nUs"), END, *ids("er:")], stop=["\nUser:", SPECIAL]) == "a\nUs"
        assert final([*ids("a"), *ids("😀".encode()[:3]), END], stop=SPECIAL) == "a"
        assert final([*ids("a\ufffd"), END], stop=SPECIAL) == "a\ufffd"
        assert final([*byte_tokens("你"), PIECES.eos_token_id, *byte_tokens("x")], tokenizer=PIECES, stop=SPECIAL) == "你"

    def test_special_stop_that_is_written_in_letters_ends_the_text_too(self):
        letters = [token_id for letter in SPECIAL for token_id in ids(letter.encode())]
        assert END not in letters
        assert final([*ids("a"), *letters, *ids("b")], stop=SPECIAL) == "a"

    def test_special_stop_before_min_tokens_is_passed_over(self):
        assert final([END, *ids(b"ab"), END, *ids(b"c")], stop=SPECIAL, min_tokens=3) == "ab"
        assert final([END, *ids(b"ab")], stop=SPECIAL, min_tokens=2) == "ab"

    def test_special_stop_goes_on_in_a_fork(self):
        child = Detokenizer(TokenDecoder(BYTES), [], SamplingParams(stop=SPECIAL)).fork()
        child.append(END)
        assert child.stop_hit == SPECIAL

    @pytest.mark.parametrize("stop", [SPECIAL + "\n", "x" + SPECIAL, SPECIAL * 2])
    def test_special_stop_with_text_around_it_is_refused_with_what_to_do(self, stop):
        message = rf"^stop has .*holds the special token '{re.escape(SPECIAL)}'.*or stop_token_ids=\[{END}\]\.$"
        with pytest.raises(ValueError, match=message):
            Detokenizer(TokenDecoder(BYTES), [], SamplingParams(stop=["ok", stop]))


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
        parent = Detokenizer(TokenDecoder(BYTES), ids("the"), SamplingParams(stop=stop))
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
    stream = TextStream(TokenDecoder(counting), ids("the"))
    for token_id in token_ids:
        stream.append(token_id)
    stream.finish()
    assert counting.decoded <= 5 * LONGEST_CHARACTER * len(token_ids)


def test_added_tokens_are_listed_once_for_all_requests():
    """Case: 6,400 added tokens were listed twice a request, and again for each continuation: 1.1 s for n = 64."""
    listings = []

    class Listing(Counting):
        added_tokens_decoder = property(lambda self: listings.append(1) or self.tokenizer.added_tokens_decoder, lambda *_: None)

    decoder = TokenDecoder(Listing(BYTES))
    for _ in range(5):
        Detokenizer(decoder, ids("the"), SamplingParams(stop=[SPECIAL, "x"])).append(END)
    assert len(listings) == 1


def test_a_long_prompt_costs_no_more_than_a_short_one():
    counting = Counting(BYTES)
    TextStream(TokenDecoder(counting), ids("the fox ") * 2000)
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
    detokenizer = Detokenizer(TokenDecoder(BYTES), ids("the"), SimpleNamespace(stop=("x",), min_tokens=0))
    detokenizer.append(*ids(b"x"))
    assert detokenizer.stop_hit == "x"
