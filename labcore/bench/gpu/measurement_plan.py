"""Measurement plan of `labcore bench gpu`: shapes, models and clock in one object, so that tests can use a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from labcore.attention.sample_batch import Heads
from labcore.bench.gpu.timing import DeviceTimes, copy_bandwidth, device_times


def qwen3_0_6b() -> PreTrainedConfig:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )


def llama_3_1_8b() -> PreTrainedConfig:
    """The shape of Llama-3.1-8B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class EngineSize:
    """A model configuration for random weights, and the GB of its 16-bit weights and KV pool."""

    config: Callable[[], PreTrainedConfig]
    gigabytes: float


@dataclass(frozen=True)
class Plan:
    """What to measure. Sequences are (total tokens, query tokens). Clock, copy bandwidth and free memory can be replaced."""

    device: torch.device
    dtype: torch.dtype
    check_heads: tuple[Heads, ...] = (
        Heads(32, 8, 128),
        Heads(9, 3, 64),
        Heads(8, 8, 80),
        Heads(14, 2, 64),
        Heads(48, 1, 96),
        Heads(8, 1, 256),
    )
    decode_seqs: tuple[tuple[int, int], ...] = ((1, 1), (17, 1), (300, 1), (1024, 1), (5000, 1))
    mixed_seqs: tuple[tuple[int, int], ...] = ((64, 64), (1, 1), (700, 33), (2049, 1), (130, 130), (513, 500))
    heads: Heads = Heads()
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    contexts: tuple[int, ...] = (128, 1024, 4096, 8192, 32_768)
    goal_point: tuple[int, int] = (64, 4096)
    prefills: tuple[tuple[int, int], ...] = ((1, 1024), (1, 4096), (4, 4096), (1, 16_384))
    engines: Mapping[str, EngineSize] = field(
        default_factory=lambda: {
            "Qwen3-0.6B": EngineSize(qwen3_0_6b, 12),
            "Llama-3.1-8B": EngineSize(llama_3_1_8b, 28),
        }
    )
    requests: int = 64
    prompt_tokens: int = 512
    output_tokens: int = 128
    time_of: Callable[[Callable[[], object]], DeviceTimes] = device_times
    copy_gb_per_s: Callable[[], float] = copy_bandwidth
    free_bytes: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0]


def gpu_plan() -> Plan:
    """The full plan for the current GPU, in bfloat16, or in float16 below sm_80."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    return Plan(torch.device("cuda"), dtype)
