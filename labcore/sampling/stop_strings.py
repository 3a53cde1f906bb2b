"""Stop strings: match them in text that arrives in pieces, and hold back what may become one.

    stop = "\\nUser:"    piece    Hello   ␣😀   \\nUs   er   :
                        output   Hello   ␣😀     –     –   stop
"""

from __future__ import annotations

from collections.abc import Sequence

from labcore.models.token_decoder import TokenDecoder


class StopStrings:
    """Incremental stop-string matching: text in, text up to the first match out.

    A suffix that is a prefix of a stop string is held back. The match that ends first wins, of several that end at the
    same character the longest: the result doesn't depend on how the text is split into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def append(self, new_text: str, may_stop: bool = True) -> str:
        """The text that is safe to stream. With may_stop False, matches that end in `new_text` are ordinary text."""
        if self.hit is not None:
            return ""
        text = self._held + new_text
        if may_stop:
            found = [match for stop in self._stops if (match := self._find(stop, text)) is not None]
            if found:
                _, start, self.hit = min(found)
                self._held = ""
                return text[:start]
        shown = len(text) - self._num_open(text)
        self._held = text[shown:]
        return text[:shown]

    def would_hit(self, new_text: str) -> bool:
        """Whether appending `new_text` would complete a stop string. Changes nothing."""
        return any(self._find(stop, self._held + new_text) is not None for stop in self._stops)

    def finish(self) -> str:
        """The text held back, which no further text can complete."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first match that ends in the new text; held-back text alone holds none."""
        start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
        return None if start < 0 else (start + len(stop), start, stop)

    def _num_open(self, text: str) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > size and stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def special_stops(stops: Sequence[str], decoder: TokenDecoder | None) -> dict[int, str]:
    """Maps the ids of special tokens to the stop strings that name them.

    Raises ValueError if there is no tokenizer, or if a stop string contains a special token and more: no text matches it.
    """
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
