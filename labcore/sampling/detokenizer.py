"""From tokens to text while it grows: never half a character, never a piece that is taken back.

    stop = "\\nUser:"   tokens   Hello   ␣ F0 9F   98   80   \\nUs   er   :       (a hex pair is a byte of 😀)
                 TextStream   Hello     –     –    ␣😀   \\nUs   er   :       waits for the rest of a character
                 StopStrings  Hello               ␣😀     –     –   stop    waits while it may become a stop string

A token is a run of bytes, and a character may be spread over several tokens. What a decoder makes of a token also
depends on its neighbour to the left: sentencepiece drops the space that a text begins with. So tokens are decoded in a
window of context and news, and the news is what the text grows by: two short decodes a token, however long the text.
Source: the prefix and read offsets of text-generation-inference and of vLLM.

Byte tokens of sentencepiece wait for the end of their run. A run is decoded as one: a stray byte at its end turns every
character before it into replacement characters.
"""

from __future__ import annotations

import os.path
from codecs import getincrementaldecoder
from collections.abc import Sequence
from copy import copy
from itertools import islice

from labcore.models.token_decoder import TokenDecoder
from labcore.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder puts where bytes are no character, or not yet one
CONTEXT = 6  # tokens of the prompt that the decoder sees to the left of the first output token
LONGEST_CHARACTER = 8  # tokens; a character has 4 bytes at most and a token 1 at least, the rest is margin
MOST_MISSING = 3  # bytes of a character that can be there when the last one is not


class Detokenizer:
    """The text of one continuation.

    text       safe to show: it only ever grows, and ends where a stop string begins
    stop_hit   the stop string that was found, or None

    A stop string that is a special token's name ends the text where that token comes, although the token gives no text.
    """

    def __init__(self, decoder: TokenDecoder | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """decoder: None for a model without a tokenizer, whose text stays empty.

        Raises ValueError for a stop string that can't be found: in no text, or across a special token.
        """
        self.text = ""
        self.stop_hit: str | None = None
        self._stream = TextStream(decoder, prompt_token_ids) if decoder is not None else None
        self._stops = StopStrings(params.stop)
        self._stop_tokens = special_stops(params.stop, decoder) if params.stop else {}
        self._num_tokens = 0
        self._min_tokens = params.min_tokens

    def append(self, token_id: int) -> None:
        """Take in the next output token. Stop strings count if they are complete at token min_tokens or later."""
        self._num_tokens += 1
        if self._stream is None or self.stop_hit is not None:
            return
        if token_id in self._stop_tokens and self._may_stop:
            self.finish()
            self.stop_hit = self.stop_hit or self._stop_tokens[token_id]
            return
        self._grow(self._stream.append(token_id))
        if self._stream.holds_bytes and self._may_stop and self._stops.would_hit(self._stream.pending()):
            self._grow(self._stream.finish())

    def finish(self) -> None:
        """No more tokens come: show what was held back, except half a character and what belongs to a stop string."""
        if self._stream is not None:
            self._grow(self._stream.finish())
            self.text += self._stops.finish()

    def fork(self) -> Detokenizer:
        """A second one that has taken in the same tokens. From here on each grows by itself."""
        child = copy(self)
        child._stops = copy(self._stops)
        child._stream = None if self._stream is None else self._stream.fork()
        return child

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens >= self._min_tokens

    def _grow(self, news: str) -> None:
        self.text += self._stops.append(news, self._may_stop)
        self.stop_hit = self.stop_hit or self._stops.hit


def special_stops(stops: Sequence[str], decoder: TokenDecoder | None) -> dict[int, str]:
    """Special tokens that stop strings name, by id. Raises ValueError for stop strings that no text can hold."""
    if decoder is None:
        raise ValueError(
            f"stop is {stops!r}; it must be None for a model without a tokenizer, which gives no text to search: use "
            "stop_token_ids."
        )
    names = decoder.special_tokens
    for stop in stops:
        for name in names if stop not in names else ():
            if name and name in stop:
                raise ValueError(
                    f"stop has {stop!r}, which holds the special token {name!r}; special tokens give no text to search: use "
                    f"stop={name!r} or stop_token_ids=[{names[name]}]."
                )
    return {names[stop]: stop for stop in stops if stop in names}


class TextStream:
    """Output tokens in, whole characters out. Joined, they are what decoding all tokens at once gives.

    Special tokens give no text. A prompt may end in the middle of a character: if the output completes it, the
    character belongs to the output; if not, nothing of it does.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        audible = (token_id for token_id in reversed(prompt_token_ids) if token_id not in decoder.special_ids)
        self._window = list(islice(audible, CONTEXT + LONGEST_CHARACTER))[::-1]
        start, stop = self._whole_characters(self._window)
        self._window = self._window[start:]
        self._num_context = stop - start
        self._context_text = decoder.decode(self._window[: self._num_context])
        # What the prompt's last, unfinished character looks like as long as it stays so. It is not output.
        self._prompt_tail = decoder.decode(self._window)[len(self._context_text) :]

    @property
    def holds_bytes(self) -> bool:
        """Whether the last token is one of a run of byte tokens, which may go on."""
        return len(self._window) > self._num_context and self._window[-1] in self._decoder.byte_tokens

    def append(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._decoder.special_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._decoder.byte_tokens:
            return ""
        text = self._decoder.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(self._window))
        if len(self._window) - self._num_context > LONGEST_CHARACTER:
            return self._release_settled(text)
        return ""

    def finish(self) -> str:
        """What was held back. Half a character is dropped; a replacement character that the model wrote is text."""
        if self.holds_bytes:
            end = [self._decoder.byte_tokens.get(token_id, 0) for token_id in self._window[-MOST_MISSING:]]
            del self._window[len(self._window) - num_unfinished(bytes(end)) :]
            return self._release(self._decoder.decode(self._window), len(self._window))
        held = self._window[self._num_context :]
        news = self._release(self._decoder.decode(self._window), len(self._window))
        return news[:-1] if news.endswith(REPLACEMENT) and not self._was_written(held) else news

    def pending(self) -> str:
        """What `finish` would give. Changes nothing."""
        return self.fork().finish()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What the stream would give if these were the last tokens, in one go. Changes nothing."""
        stream = self.fork()
        stream._window += [token_id for token_id in token_ids if token_id not in self._decoder.special_ids]
        return stream.finish()

    def fork(self) -> TextStream:
        """A second stream that stands where this one does."""
        child = copy(self)
        child._window = list(self._window)
        return child

    def _was_written(self, token_ids: list[int]) -> bool:
        """Whether the last of these tokens encode to themselves, which half a character never does."""
        for size in range(1, min(len(token_ids), LONGEST_CHARACTER) + 1):
            end = token_ids[-size:]
            encoded = self._decoder.encode(self._decoder.decode(end))
            if encoded[-size:] == end and not self._decoder.decode(encoded[:-size]).strip():
                return True
        return False

    def _whole_characters(self, token_ids: list[int]) -> tuple[int, int]:
        """The last stretch (start, stop) of a prompt that cuts no character in two, at either end."""
        earliest = max(0, len(token_ids) - LONGEST_CHARACTER)
        for stop in range(len(token_ids), earliest, -1):
            for start in range(max(0, stop - CONTEXT), stop):
                text = self._decoder.decode(token_ids[start:stop])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return start, stop
        return earliest, earliest

    def _release(self, text: str, stop: int) -> str:
        """Give out the news in `text`, the window decoded up to `stop`; its tokens are the context from here on."""
        news = text[len(self._context_text) :]
        if news or stop - self._num_context > LONGEST_CHARACTER:
            del self._window[: self._num_context]
            self._num_context = stop - self._num_context
            self._context_text = self._decoder.decode(self._window[: self._num_context])
        if self._prompt_tail:
            shared = len(os.path.commonprefix([news, self._prompt_tail]))
            self._prompt_tail = self._prompt_tail[shared:] if shared == len(news) else ""
            news = news[shared:]
        return news

    def _release_settled(self, text: str) -> str:
        """Give out a long run of bytes that are no text, all but its end, which may yet become a character.

        Where the two halves decode to what the whole does, no character lies across the cut.
        """
        for stop in range(len(self._window) - 1, self._num_context, -1):
            head = self._decoder.decode(self._window[:stop])
            if head + self._decoder.decode(self._window[stop:]) == text:
                return self._release(head, stop)
        return ""


def num_unfinished(data: bytes) -> int:
    """How many of the last bytes are the beginning of a character, 0 to 3."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return len(decoder.getstate()[0])


class StopStrings:
    """Text in, text out, up to the first stop string. Holds back an end that may be the beginning of one.

    Of several, the one that is complete first counts, and of those complete at the same character the longest: so the
    result doesn't depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def append(self, news: str, may_stop: bool = True) -> str:
        """The text that is safe to show now. With may_stop False, what the news completes is text like any other."""
        if self.hit is not None:
            return ""
        text = self._held + news
        if may_stop:
            found = [match for stop in self._stops if (match := self._find(stop, text)) is not None]
            if found:
                _, start, self.hit = min(found)
                self._held = ""
                return text[:start]
        shown = len(text) - self._num_open(text)
        self._held = text[shown:]
        return text[:shown]

    def would_hit(self, news: str) -> bool:
        """Whether the text so far and `news` hold a stop string. Changes nothing."""
        return any(self._find(stop, self._held + news) is not None for stop in self._stops)

    def finish(self) -> str:
        """What was held back, now that nothing can complete it."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first match that the news completes; held text alone was looked at before."""
        start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
        return None if start < 0 else (start + len(stop), start, stop)

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with, short of the whole string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > size and stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
