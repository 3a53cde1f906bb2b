"""Detokenizer: the text of one output while its tokens arrive, for streaming.

    token → TextStream (complete characters) → StopStrings (no partial stop string) → text

Text that was given out is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from labcore.models.token_decoder import TokenDecoder
from labcore.sampling.stop_strings import StopStrings, special_stops
from labcore.sampling.text_stream import TextStream
from labcore.sampling_params import SamplingParams


class Detokenizer:
    """Incremental detokenization of one output, up to its first stop string.

    text       text that is safe to stream: it is only appended to, and ends before a stop string
    stop_hit   the stop string that was found, or None

    A stop string that names a special token matches at that token, although special tokens give no text.
    """

    def __init__(self, decoder: TokenDecoder | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """decoder: None for a model without a tokenizer; text then stays empty.

        Raises ValueError for stop strings that can't match: see `special_stops`.
        """
        self.text = ""
        self.stop_hit: str | None = None
        self._stream = TextStream(decoder, prompt_token_ids) if decoder is not None else None
        self._stops = StopStrings(params.stop)
        self._stop_tokens = special_stops(params.stop, decoder) if params.stop else {}
        self._num_tokens = 0
        self._min_tokens = params.min_tokens

    def append(self, token_id: int) -> None:
        """Add the next output token. Stop strings completed before token `min_tokens` are ignored."""
        self._num_tokens += 1
        if self._stream is None or self.stop_hit is not None:
            return
        if token_id in self._stop_tokens and self._may_stop:
            self.finish()
            self.stop_hit = self.stop_hit or self._stop_tokens[token_id]
            return
        self._append_text(self._stream.append(token_id))
        if self._stream.holds_bytes and self._may_stop and self._stops.would_hit(self._stream.pending()):
            self._append_text(self._stream.finish())

    def finish(self) -> None:
        """End of output: flush the text held back, except an incomplete character or text from a stop string on."""
        if self._stream is not None:
            self._append_text(self._stream.finish())
            self.text += self._stops.finish()

    def fork(self) -> Detokenizer:
        """An independent copy in the same state."""
        child = copy(self)
        child._stops = copy(self._stops)
        child._stream = None if self._stream is None else self._stream.fork()
        return child

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens >= self._min_tokens

    def _append_text(self, new_text: str) -> None:
        self.text += self._stops.append(new_text, self._may_stop)
        self.stop_hit = self.stop_hit or self._stops.hit
