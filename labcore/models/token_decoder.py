"""A tokenizer as the detokenizer sees it: what is costly to find out about its tokens is found out once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDecoder:
    """Tokens to text and back, without special tokens.

    tokenizer   transformers' own, or anything that can encode and decode, and has `added_tokens_decoder`. Tokens that are
                added to it later are not known here
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that give no text, by name. To list thousands of added tokens takes a tokenizer tens of milliseconds."""
        return {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """The byte of each of the tokens <0x00> … <0xFF>, if the tokenizer falls back to bytes, as sentencepiece does."""
        to_ids = getattr(self.tokenizer, "convert_tokens_to_ids", None)
        if to_ids is None:
            return {}
        ids = to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        euro = [ids[byte] for byte in "€".encode()]
        if None in euro or self.decode(euro) != "€":  # no such tokens, or they are text like any other
            return {}
        return {token_id: byte for byte, token_id in enumerate(ids) if token_id not in (None, self.tokenizer.unk_token_id)}

    def decode(self, token_ids: Sequence[int]) -> str:
        # No clean-up: it would take back spaces that are already on the screen.
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
