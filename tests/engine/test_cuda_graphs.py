"""Decode graphs, captured by a stand-in that computes anew: buffers, buckets and padding are the real ones."""

from __future__ import annotations

import pytest
import torch
from paged_batches import paged_batch
from tiny_models import prompt, tiny

pytest.importorskip("triton", reason="Triton exists for Linux only")

from labcore import SamplingParams  # noqa: E402
from labcore.engine.cuda_graphs import DecodeGraphs, bucket_sizes  # noqa: E402
from labcore.llm import LLM  # noqa: E402
from labcore.models import from_model  # noqa: E402


def capture_again(run):
    """What a CUDA graph does, without CUDA: the same function over the same memory, its result in the same place."""
    out = run()
    return lambda: out.copy_(run()), out


def graphs_of(forward, max_num_seqs: int = 8) -> DecodeGraphs:
    sizes = dict(max_num_seqs=max_num_seqs, max_blocks=8, max_model_len=32, block_size=4)
    return DecodeGraphs(forward, **sizes, device=torch.device("cpu"), capture=capture_again)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_cuda_graphs_change_no_token_while_requests_come_and_go(backend):
    loaded = from_model(tiny("llama"))
    prompts = [prompt(length, seed=length) for length in (3, 9, 5)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 7, 5)]
    settings = dict(num_blocks=32, block_size=4, attention_backend=backend)
    expected = [list(out.outputs[0].token_ids) for out in LLM(loaded, **settings).generate(prompts, params)]
    llm = LLM(loaded, **settings)
    llm.engine.runner.use_graphs(max_num_seqs=8, max_model_len=32, capture=capture_again)
    assert [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)] == expected
    assert set(llm.engine.runner.graphs.buckets) == {1, 2, 4}


def test_cuda_graphs_leave_nothing_of_a_larger_step_in_the_padding():
    seen = []

    def forward(input_ids, positions, metadata, keep):
        seen.append((metadata.seq_lens.tolist(), metadata.slot_mapping.tolist(), metadata.cu_seqlens.tolist(), keep.tolist()))
        return torch.stack([input_ids, positions], dim=1)[None]

    graphs = graphs_of(forward)
    graphs.sizes = [4]
    large, small = paged_batch([(3, 1), (4, 1), (9, 1)]).metadata, paged_batch([(6, 1), (2, 1)]).metadata
    graphs.run(torch.tensor([11, 12, 13]), torch.tensor([3, 4, 9]), large)
    out = graphs.run(torch.tensor([21, 22]), torch.tensor([6, 2]), small)
    assert out.tolist() == [[[21, 6], [22, 2]]]
    assert seen[-1] == ([7, 3, 0, 0], [*small.slot_mapping.tolist(), -1, -1], [0, 1, 2, 3, 4], [0, 1, 2, 3])


def test_cuda_graph_buckets_are_small_powers_of_two_and_then_multiples_of_eight():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 4]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 24]


def test_cuda_graphs_serve_only_pure_decode_steps_that_fit():
    graphs = graphs_of(forward=None, max_num_seqs=2)
    assert graphs.serves(paged_batch([(3, 1), (4, 1)]).metadata)
    assert not graphs.serves(paged_batch([(3, 1), (4, 2)]).metadata)
    assert not graphs.serves(paged_batch([(3, 1)] * 3).metadata)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is what a machine without a GPU says")
def test_cuda_graphs_without_a_gpu_are_rejected():
    with pytest.raises(ValueError, match="cuda_graphs is True with TorchAttention on cpu"):
        LLM(from_model(tiny("llama")), num_blocks=8, block_size=4, cuda_graphs=True)
