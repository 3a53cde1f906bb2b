"""Tokenizers made on the spot: byte-level BPE, and sentencepiece-like BPE with byte fallback."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = "<|end|>"
CORPUS = ["the quick brown fox\nUser: hello world", "héllo wörld 😀 emoji 你好 世界 שלום", "a b c " * 20] * 20


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2's and SmolLM2's: every byte is a token, and frequent runs of bytes are, even across characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(SPECIAL, special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama-2's: spaces are ▁, the first one is dropped on decoding, unknown characters fall back to bytes."""
    pieces = ["<unk>", SPECIAL, "▁", *"abcdefghijklmnopqrstuvwxyz:.\n", "▁the", "▁fox", "▁▁", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


BYTES = byte_level_tokenizer()
PIECES = sentencepiece_tokenizer()
