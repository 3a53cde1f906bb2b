"""The tokenizer interface of the detokenizer; special and byte tokens are listed once and cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDecoder:
    """Tokens to text and back, without special tokens.

    tokenizer   a transformers tokenizer, or any object with `encode`, `decode` and `added_tokens_decoder`. Tokens added
                to it later are not seen
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by name. Cached: listing thousands of added tokens takes tens of milliseconds."""
        return {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Maps the ids of byte-fallback tokens <0x00> … <0xFF> (sentencepiece) to bytes; empty without byte fallback."""
        to_ids = getattr(self.tokenizer, "convert_tokens_to_ids", None)
        if to_ids is None:
            return {}
        ids = to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        euro = [ids[byte] for byte in "€".encode()]
        if None in euro or self.decode(euro) != "€":  # no byte tokens, or they decode as ordinary text
            return {}
        return {token_id: byte for byte, token_id in enumerate(ids) if token_id not in (None, self.tokenizer.unk_token_id)}

    def decode(self, token_ids: Sequence[int]) -> str:
        # Clean-up would remove spaces that were already streamed.
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
