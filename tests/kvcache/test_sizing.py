"""How many blocks fit: on a CPU and, with a stand-in for what CUDA reports, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny

from labcore import EngineConfig
from labcore.kvcache.sizing import GIB, available_memory, bytes_per_block, check_memory, memory_budget, pool_size
from labcore.models import from_model

WEIGHTS = 16 * GIB


class Gpu:
    """80 GiB, of which `used` are taken, by whomever; `kept` of those are torch's own spare."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.kept = 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * GIB - self.used, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.kept)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def model_on_a_gpu(vocab_size: int = 150_000):
    """16 GiB of weights in bfloat16, as far as the reckoning of memory looks at a model."""
    shape = SimpleNamespace(intermediate_size=14_336, hidden_size=4096, vocab_size=vocab_size)
    return SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        config=SimpleNamespace(get_text_config=lambda: shape),
        parameters=lambda: [torch.empty(WEIGHTS // 2, dtype=torch.bfloat16, device="meta")],
        buffers=lambda: [],
    )


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_pool_size_of_a_gpu_doesnt_depend_on_what_else_occupies_it(gpu, share):
    """Case: an earlier engine, another process or a compiler's scratch counted as the new engine's own."""
    config = EngineConfig(gpu_memory_utilization=share)
    budgets = []
    for gpu.used in (0, WEIGHTS, 40 * GIB, 79 * GIB):
        budgets.append(memory_budget(config, model_on_a_gpu()))
    assert len(set(budgets)) == 1 and 0 < budgets[0] < 80 * GIB * share - WEIGHTS


@pytest.mark.parametrize("max_num_seqs, vocab_size, budget", [(128, 150_000, 2048), (64, 49_152, 2048), (512, 256_000, 8192)])
def test_pool_size_leaves_room_for_the_largest_step(gpu, max_num_seqs, vocab_size, budget):
    """Case: the reckoning left the sampler out, and the first large batch of logits ran out of memory."""
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    pool = memory_budget(config, model_on_a_gpu(vocab_size))
    logits_softmax_sort = 3 * max_num_seqs * vocab_size * 4 + max_num_seqs * vocab_size * 8
    gate_up_and_product = 3 * budget * 14_336 * 2
    assert pool + WEIGHTS + max(logits_softmax_sort, gate_up_and_product) <= 0.9 * 80 * GIB


def test_pool_size_needs_a_share_that_holds_weights_and_a_block(gpu):
    config = EngineConfig(gpu_memory_utilization=0.2)
    with pytest.raises(ValueError, match="KV pool gets -.* GiB .*: raise .*gpu_memory_utilization"):
        pool_size(config, 2**20, memory_budget(config, model_on_a_gpu()), 2048)


def test_pool_size_that_doesnt_fit_now_is_rejected_with_both_numbers(gpu):
    """torch's own spare counts as free: it is what the engine of an earlier cell left behind when it went."""
    gpu.used, device = 60 * GIB, torch.device("cuda")
    with pytest.raises(ValueError, match="takes 30.0 GiB, 20.0 are free: lower .*gpu_memory_utilization.*earlier cell"):
        check_memory(30, GIB, available_memory(device))
    gpu.kept = 15 * GIB
    check_memory(30, GIB, available_memory(device))


def test_pool_size_of_a_cpu_is_what_it_is_told_and_at_most_what_all_requests_could_fill():
    model = tiny("llama")
    layers = from_model(model).layers
    per_block = bytes_per_block(layers, 16, 4)
    assert per_block == 3 * 2 * 16 * 2 * 8 * 4, "layers, K and V, slots, KV heads, head size, bytes"
    config = EngineConfig(kv_cache_memory_gb=0.001, max_num_seqs=4)
    budget = memory_budget(config, model)
    assert budget == int(0.001 * GIB)
    assert pool_size(config, per_block, budget, max_len=10_000) == budget // per_block
    assert pool_size(config, per_block, budget, max_len=100) == 4 * 7
