"""Sizing of the block pool: how many KV blocks fit, computed once at start-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from labcore.config import EngineConfig
from labcore.kvcache.host_memory import host_memory
from labcore.models.layers import LayerShape

GIB = 1024**3

CUDA_OVERHEAD_BYTES = 3 * GIB // 4
"""Estimate of what the CUDA context and library workspaces take, in bytes."""


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, element_size: int) -> int:
    """Memory that one block takes over all layers, K and V, in bytes."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * element_size for layer in layers)


def pool_size(config: EngineConfig, per_block: int, budget: int, max_len: int) -> int:
    """Number of blocks that `budget` bytes hold, but no more than `max_num_seqs` requests of `max_len` could fill.

    per_block: bytes of one block, see `bytes_per_block`. Raises ValueError if the budget holds not even one.
    """
    max_blocks = int(budget // per_block)
    if max_blocks < 1:
        raise ValueError(
            f"the KV pool gets {budget / GIB:.3f} GiB and one block takes {per_block / GIB:.3f} GiB: "
            "raise kv_cache_memory_gb (cpu) or gpu_memory_utilization (cuda), or lower block_size."
        )
    max_useful = config.max_num_seqs * -(-max_len // config.block_size)
    return min(max_blocks, max_useful)


def check_memory(num_blocks: int, per_block: int, available: int) -> None:
    """Raises ValueError if the pool would not fit into the memory that is free now: better than to be killed for it."""
    wanted = num_blocks * per_block
    if wanted > available:
        raise ValueError(
            f"a pool of {num_blocks:,} blocks takes {wanted / GIB:,.1f} GiB, {available / GIB:,.1f} are free: "
            "lower num_blocks, kv_cache_memory_gb (cpu), gpu_memory_utilization (cuda), max_model_len or max_num_seqs, "
            "or end what holds the rest, an engine of an earlier cell for one."
        )


def available_memory(device: torch.device) -> int:
    """Bytes that are free now on a device, those that torch keeps for this process's next tensors among them.

    On a CPU within the limit of the container, if there is one.
    """
    if device.type != "cuda":
        return host_memory().available
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def memory_budget(config: EngineConfig, model: PreTrainedModel) -> int:
    """Bytes for the KV pool: kv_cache_memory_gb on a CPU; on a GPU what weights and one full step leave of its share.

    Activation memory is estimated, not profiled: four copies of the widest activation for each token of the budget, and
    four of the float32 logits for each sequence (logits, softmax, sort and its indices). So the pool has the same size at
    every start, whatever else occupies the GPU at that moment; `check_memory` says whether there is room for it.
    """
    if model.device.type != "cuda":
        return int(config.kv_cache_memory_gb * GIB)
    total = torch.cuda.mem_get_info(model.device)[1]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    shape = model.config.get_text_config()
    widest = max(getattr(shape, "intermediate_size", 0), 4 * shape.hidden_size)
    activations = 4 * config.max_step_tokens * widest * model.dtype.itemsize
    logits = 4 * config.max_num_seqs * shape.vocab_size * 4
    return int(total * config.gpu_memory_utilization) - CUDA_OVERHEAD_BYTES - weights - activations - logits
