"""Incremental decoding: output tokens to text, in complete characters.

    token          Hello   ␣ F0 9F   98   80   \\nUs        (a hex pair is a byte of 😀)
    TextStream     Hello     –     –    ␣😀   \\nUs        holds back an incomplete character

A token is a run of bytes, and a character may span several tokens. The text of a token also depends on its left
neighbour: sentencepiece drops the space that a text begins with. So tokens are decoded in a window of context tokens
and new tokens, and the output is what the new ones add: two short decodes per token, whatever the length of the text.

Byte tokens of sentencepiece (<0x00> … <0xFF>) are held back to the end of their run and decoded together: one invalid
byte at the end of a run turns every character in it into U+FFFD.

Source: the prefix and read offsets of text-generation-inference and of vLLM.
"""

from __future__ import annotations

import os.path
from codecs import getincrementaldecoder
from collections.abc import Sequence
from copy import copy
from itertools import islice

from labcore.models.token_decoder import TokenDecoder

REPLACEMENT = "\ufffd"  # decoders put it in place of invalid or incomplete bytes
CONTEXT = 6  # prompt tokens decoded to the left of the first output token
LONGEST_CHARACTER = 8  # tokens; 4 bytes of at least a token each, and margin
MOST_MISSING = 3  # bytes of an incomplete character, at most


class TextStream:
    """Incremental decoding: output tokens in, complete characters out.

    The pieces join to the text that decoding all tokens at once gives. Special tokens give no text. A character that
    the prompt begins and the output completes belongs to the output.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        audible = (token_id for token_id in reversed(prompt_token_ids) if token_id not in decoder.special_ids)
        self._window = list(islice(audible, CONTEXT + LONGEST_CHARACTER))[::-1]
        start, stop = self._whole_characters(self._window)
        self._window = self._window[start:]
        self._num_context = stop - start
        self._context_text = decoder.decode(self._window[: self._num_context])
        # How the prompt's last, incomplete character decodes until the output completes it. Not output.
        self._prompt_tail = decoder.decode(self._window)[len(self._context_text) :]

    @property
    def holds_bytes(self) -> bool:
        """Whether the window ends in a run of byte tokens."""
        return len(self._window) > self._num_context and self._window[-1] in self._decoder.byte_tokens

    def append(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
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
        """The text held back. An incomplete character is dropped; a U+FFFD that the model generated is kept."""
        if self.holds_bytes:
            end = [self._decoder.byte_tokens.get(token_id, 0) for token_id in self._window[-MOST_MISSING:]]
            del self._window[len(self._window) - num_unfinished(bytes(end)) :]
            return self._release(self._decoder.decode(self._window), len(self._window))
        held = self._window[self._num_context :]
        new_text = self._release(self._decoder.decode(self._window), len(self._window))
        return new_text[:-1] if new_text.endswith(REPLACEMENT) and not self._was_written(held) else new_text

    def pending(self) -> str:
        """What `finish` would return. Changes nothing."""
        return self.fork().finish()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` if they followed and ended the output. Changes nothing."""
        stream = self.fork()
        stream._window += [token_id for token_id in token_ids if token_id not in self._decoder.special_ids]
        return stream.finish()

    def fork(self) -> TextStream:
        """An independent copy in the same state."""
        child = copy(self)
        child._window = list(self._window)
        return child

    def _was_written(self, token_ids: list[int]) -> bool:
        """Whether the last tokens round-trip (decode, encode): those of an incomplete character never do."""
        for size in range(1, min(len(token_ids), LONGEST_CHARACTER) + 1):
            end = token_ids[-size:]
            encoded = self._decoder.encode(self._decoder.decode(end))
            if encoded[-size:] == end and not self._decoder.decode(encoded[:-size]).strip():
                return True
        return False

    def _whole_characters(self, token_ids: list[int]) -> tuple[int, int]:
        """The last span (start, stop) of prompt tokens that begins and ends on character boundaries."""
        earliest = max(0, len(token_ids) - LONGEST_CHARACTER)
        for stop in range(len(token_ids), earliest, -1):
            for start in range(max(0, stop - CONTEXT), stop):
                text = self._decoder.decode(token_ids[start:stop])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return start, stop
        return earliest, earliest

    def _release(self, text: str, stop: int) -> str:
        """Return the new part of `text`, the window decoded up to `stop`, whose tokens become the context."""
        new_text = text[len(self._context_text) :]
        if new_text or stop - self._num_context > LONGEST_CHARACTER:
            del self._window[: self._num_context]
            self._num_context = stop - self._num_context
            self._context_text = self._decoder.decode(self._window[: self._num_context])
        if self._prompt_tail:
            shared = len(os.path.commonprefix([new_text, self._prompt_tail]))
            self._prompt_tail = self._prompt_tail[shared:] if shared == len(new_text) else ""
            new_text = new_text[shared:]
        return new_text

    def _release_settled(self, text: str) -> str:
        """Release a long run of invalid UTF-8, except its end, which may still become a character.

        A cut is on a character boundary if both parts decode to what the whole decodes to.
        """
        for stop in range(len(self._window) - 1, self._num_context, -1):
            head = self._decoder.decode(self._window[:stop])
            if head + self._decoder.decode(self._window[stop:]) == text:
                return self._release(head, stop)
        return ""


def num_unfinished(data: bytes) -> int:
    """How many of the last bytes belong to an incomplete UTF-8 character, 0 to 3."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return len(decoder.getstate()[0])
