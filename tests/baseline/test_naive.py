"""The naive cache: as right as transformers, and wasteful in exactly the ways that notebook 01 says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from labcore.baseline.naive import (
    ContiguousCache,
    OutOfSlots,
    Region,
    RegionAllocator,
    StaticBatch,
    attend,
    contiguous_attention,
    generate,
    generate_without_cache,
    kv_bytes_per_token,
    memory_breakdown,
    pad_left,
    padding_share,
    reservation_waste,
    simulate_first_fit,
    slot_steps,
    static_batches,
    utilization,
)
from labcore.models import LayerShape, load
from labcore.recorder import Span
from labcore.workload.traces import TraceRequest, load_trace

HEADS = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig(**HEADS), 2),
    "qwen3": (Qwen3Config(**HEADS), 2),
    "mistral, window 5": (MistralConfig(**HEADS, sliding_window=5), 2),
    "gemma2, window 5 and softcap": (
        Gemma2Config(**HEADS, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0), 2),
    "gpt2": (GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1,
                        eos_token_id=2), 6),
}  # fmt: skip
PROMPTS = [[5, 7, 9, 11, 30, 31], [8], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]


def tiny(name: str = "llama"):
    """A model with random weights, its KV cache full of NaN, and room for three rows of 40 slots."""
    config, num_kv_heads = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    cache = ContiguousCache([LayerShape(6, num_kv_heads, 8)] * 2, num_slots=120)
    for buffer in cache.k + cache.v:
        buffer.fill_(torch.nan)
    return model, cache


def transformers_greedy(model, prompt: list[int], max_tokens: int, eos: int | list[int] | None = None) -> list[int]:
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def one_thread():
    """Tiny products are slower on two threads than on one, and on a busy machine far slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
class TestTokens:
    @pytest.mark.parametrize("name", MODELS)
    def test_three_ways_to_generate_give_transformers_tokens(self, name):
        model, cache = tiny(name)
        expected = [transformers_greedy(model, prompt, 20) for prompt in PROMPTS]
        assert [generate_without_cache(model, prompt, 20) for prompt in PROMPTS] == expected
        assert [generate(model, [prompt], 20, cache, max_len=40)[0] for prompt in PROMPTS] == expected
        assert generate(model, PROMPTS, 20, cache, max_len=40) == expected
        assert cache.allocator.holes == [Region(0, 120)]

    def test_a_row_that_stops_early_keeps_its_stop_token_and_leaves_the_others_alone(self):
        model, cache = tiny()
        free = generate(model, PROMPTS, 20, cache, max_len=40)
        stop = free[0][4]
        expected = [transformers_greedy(model, prompt, 20, eos=stop) for prompt in PROMPTS]
        assert generate(model, PROMPTS, 20, cache, max_len=40, stop_ids={stop}) == expected
        assert [generate_without_cache(model, prompt, 20, {stop}) for prompt in PROMPTS] == expected
        assert len(expected[0]) <= 5 and max(map(len, expected)) > 5

    def test_regions_in_odd_places_change_no_token(self):
        model, cache = tiny()
        expected = generate(model, PROMPTS[:2], 4, cache, max_len=16)
        taken = [cache.allocator.allocate(16) for _ in range(7)]
        for region in (taken[5], taken[1]):
            cache.allocator.free(region)
        assert generate(model, PROMPTS[:2], 4, cache, max_len=16) == expected
        assert cache.allocator.holes == [taken[1], taken[5], Region(112, 8)]

    def test_no_tokens_asked_for_is_no_tokens(self):
        model, cache = tiny()
        assert generate(model, PROMPTS, 0, cache, max_len=40) == [[], [], []]
        assert generate(model, [], 5, cache, max_len=40) == []
        assert generate_without_cache(model, PROMPTS[0], 0) == []

    @pytest.mark.parametrize("prompt", [[], [1] * 21])
    def test_a_prompt_that_cannot_fit_its_region_is_refused_before_anything_runs(self, prompt):
        model, cache = tiny()
        with pytest.raises(ValueError, match="leaves room for 1 to 20"):
            generate(model, [[1], prompt], 20, cache, max_len=40)
        assert cache.allocator.num_free == 120

    def test_a_batch_that_does_not_fit_the_buffer_gives_everything_back(self):
        model, cache = tiny()
        with pytest.raises(OutOfSlots, match="40 slots in a row were asked for; 0 are free"):
            generate(model, PROMPTS + PROMPTS, 20, cache, max_len=40)
        assert cache.allocator.holes == [Region(0, 120)]
        assert len(generate(model, PROMPTS, 20, cache, max_len=40)) == 3

    def test_a_model_with_attention_sinks_is_refused(self):
        module, batch = torch.nn.Identity(), StaticBatch(None, [], [], [])
        with pytest.raises(ValueError, match="sinks"):
            contiguous_attention(module, *torch.zeros(3, 1, 1, 1, 4), None, static_batch=batch, s_aux=torch.zeros(1))


@pytest.mark.model
def test_the_real_model_says_what_transformers_says_alone_and_in_a_padded_batch(smollm2):
    loaded = load(smollm2, device="cpu", dtype="float32")
    model, eos = loaded.model, loaded.eos_token_ids
    texts = ["The capital of France is", "Hi", "def add(a, b):", "Count: 1 2 3 4 5 6 7 8 9 10 11 12 13", "2 + 2 =",
             "Paging in an operating system means that", "The three primary colours are", "Once upon a time"]  # fmt: skip
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    cache = ContiguousCache(loaded.layers, num_slots=8 * 64)
    expected = [transformers_greedy(model, prompt, 16, list(eos)) for prompt in prompts]
    assert generate(model, prompts, 16, cache, 64, eos) == expected
    assert [generate(model, [prompt], 16, cache, 64, eos)[0] for prompt in prompts] == expected


class TestAttend:
    @settings(deadline=None, max_examples=60)
    @given(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 16])),
        queries=st.integers(1, 6),
        history=st.integers(0, 9),
        window=st.one_of(st.none(), st.integers(1, 8)),
        softcap=st.one_of(st.none(), st.just(1.5)),
    )
    def test_it_is_attention_written_out_one_query_at_a_time(self, shape, queries, history, window, softcap):
        heads, group, dim = shape
        q = torch.randn(heads * group, queries, dim, dtype=torch.float64)
        k, v = torch.randn(2, heads, history + queries, dim, dtype=torch.float64)
        out = attend(q, k, v, scaling=0.3, sliding_window=window, softcap=softcap)
        for head in range(heads * group):
            for row in range(queries):
                stop = history + row + 1
                seen = slice(0 if window is None else max(0, stop - window), stop)
                scores = k[head // group, seen] @ q[head, row] * 0.3
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                torch.testing.assert_close(
                    out[head, row], scores.softmax(0) @ v[head // group, seen], rtol=1e-5, atol=1e-5
                )

    def test_padding_goes_left_and_positions_start_at_the_first_real_token(self):
        ids, positions = pad_left([[7, 8, 9], [5]])
        assert ids.tolist() == [[7, 8, 9], [0, 0, 5]]
        assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]


class TestCache:
    def test_what_was_written_is_read_back_in_order_without_a_copy(self):
        cache = ContiguousCache([LayerShape(2, 2, 4)], num_slots=10)
        cache.allocator.allocate(3)
        region = cache.allocator.allocate(5)
        k, v = torch.randn(2, 2, 4, 4)
        cache.extend(0, region, 0, k[:, :3], v[:, :3])
        keys, values = cache.extend(0, region, 3, k[:, 3:], v[:, 3:])
        assert torch.equal(keys, k) and torch.equal(values, v)
        assert keys.data_ptr() == cache.k[0][3].data_ptr()

    def test_the_last_reserved_slot_can_be_filled_and_the_one_behind_it_belongs_to_the_neighbour(self):
        cache = ContiguousCache([LayerShape(1, 1, 2)], num_slots=8)
        ana, bo = cache.allocator.allocate(4), cache.allocator.allocate(4)
        token = torch.ones(1, 1, 2)
        cache.extend(0, bo, 0, 7 * token, 7 * token)
        cache.extend(0, ana, 3, token, token)
        before = cache.k[0].clone()
        with pytest.raises(OutOfSlots, match="5 tokens in a region of 4 slots"):
            cache.extend(0, ana, 4, token, token)
        assert torch.equal(cache.k[0][bo.start], 7 * token[0]) and torch.equal(cache.k[0][4:5], before[4:5])

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [((30, 3, 64, 4), 46_080), ((32, 8, 128, 2), 131_072), ((80, 8, 128, 2), 327_680)],
        ids=["SmolLM2-135M float32", "Llama-3.1-8B bfloat16", "Llama-3.1-70B bfloat16"],
    )
    def test_kv_bytes_per_token(self, shape, expected):
        assert kv_bytes_per_token(*shape) == expected

    def test_the_formula_is_what_the_cache_really_takes(self):
        cache = ContiguousCache([LayerShape(6, 2, 8)] * 3, num_slots=5, dtype=torch.float16)
        assert sum(buffer.nbytes for buffer in cache.k + cache.v) == 5 * kv_bytes_per_token(3, 2, 8, 2)


class RegionMachine(RuleBasedStateMachine):
    """The allocator against a plain list with one owner per slot."""

    def __init__(self):
        super().__init__()
        self.allocator = RegionAllocator(32)
        self.owner: list[int | None] = [None] * 32
        self.regions: dict[int, Region] = {}
        self.next_name = 0

    @rule(size=st.integers(1, 12))
    def allocate(self, size):
        first = next((i for i in range(32 - size + 1) if self.owner[i : i + size] == [None] * size), None)
        if first is None:
            with pytest.raises(OutOfSlots):
                self.allocator.allocate(size)
            return
        region = self.allocator.allocate(size)
        assert region == Region(first, size)
        self.owner[first : region.stop] = [self.next_name] * size
        self.regions[self.next_name] = region
        self.next_name += 1

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def free(self, data):
        region = self.regions.pop(data.draw(st.sampled_from(sorted(self.regions))))
        self.allocator.free(region)
        self.owner[region.start : region.stop] = [None] * region.size

    @rule(start=st.integers(-2, 33), size=st.integers(0, 6))
    def free_what_nobody_wholly_owns(self, start, size):
        region = Region(start, size)
        if start >= 0 and size > 0 and region.stop <= 32 and None not in self.owner[start : region.stop]:
            return
        with pytest.raises(ValueError, match="not allocated"):
            self.allocator.free(region)

    @invariant()
    def holes_are_the_maximal_runs_of_free_slots(self):
        runs, start = [], None
        for slot, owner in enumerate([*self.owner, -1]):
            if owner is None and start is None:
                start = slot
            elif owner is not None and start is not None:
                runs.append(Region(start, slot - start))
                start = None
        assert self.allocator.holes == runs
        assert self.allocator.num_free == self.owner.count(None)
        assert self.allocator.largest_hole == max((run.size for run in runs), default=0)


TestRegionAllocator = RegionMachine.TestCase
TestRegionAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_allocator_of_no_slots_and_a_region_of_no_size_are_refused():
    with pytest.raises(ValueError, match="num_slots is 0"):
        RegionAllocator(0)
    with pytest.raises(ValueError, match="size is -1"):
        RegionAllocator(4).allocate(-1)


class TestWaste:
    def test_a_request_fills_its_prompt_first_and_then_one_slot_a_step(self):
        assert slot_steps(TraceRequest(0, prompt_tokens=5, output_tokens=3), steps=3) == 5 + 6 + 7

    def test_reservation_waste_is_counted_over_the_whole_life_of_a_request(self):
        short, long = TraceRequest(0, 2, 2), TraceRequest(0, 6, 1)
        assert reservation_waste([short, long], reserved=8) == pytest.approx(1 - (2 + 3 + 6) / (16 + 8))

    def test_requests_that_could_never_fit_are_left_out(self):
        fits = TraceRequest(0, 2, 2)
        assert reservation_waste([fits, TraceRequest(0, 90, 1)], 8) == reservation_waste([fits], 8)

    def test_the_first_in_line_waits_for_a_hole_of_its_size(self):
        log = [TraceRequest(0, 3, 1), TraceRequest(0, 3, 4), TraceRequest(0, 3, 2), TraceRequest(0, 5, 1)]
        residencies = simulate_first_fit(log, 12, reserve=lambda request: request.prompt_tokens + request.output_tokens)
        assert [(residency.region, residency.start, residency.stop) for residency in residencies] == [
            (Region(0, 4), 0, 1),
            (Region(4, 7), 0, 4),
            (Region(0, 5), 4, 6),       # 5 slots are free from step 1 on, 4 and 1 of them
            (Region(5, 6), 4, 5),
        ]
        assert memory_breakdown(residencies, 12) == pytest.approx({"tokens": 21 / 48, "reserved": 11 / 48, "free": 16 / 48})

    def test_a_request_larger_than_the_buffer_is_refused_once_the_buffer_is_empty(self):
        with pytest.raises(OutOfSlots, match="9 slots in a row were asked for; 8 are free"):
            simulate_first_fit([TraceRequest(0, 4, 2), TraceRequest(0, 8, 1)], 8, lambda request: request.prompt_tokens + 1)

    @pytest.mark.parametrize("reserve", [lambda r: 8192, lambda r: r.prompt_tokens + r.output_tokens])
    def test_no_two_requests_ever_hold_the_same_slot(self, reserve):
        residencies = simulate_first_fit(load_trace()[:400], 1 << 15, reserve)
        for index, residency in enumerate(residencies):
            for other in residencies[:index]:
                if residency.start < other.stop and other.start < residency.stop:
                    assert residency.region.stop <= other.region.start or other.region.stop <= residency.region.start
        assert sum(memory_breakdown(residencies, 1 << 15).values()) == pytest.approx(1)

    def test_the_shares_run_to_the_end_when_nobody_had_to_wait(self):
        residencies = simulate_first_fit([TraceRequest(0, 2, 2)], 8, lambda request: 4)
        assert memory_breakdown(residencies, 8) == pytest.approx({"tokens": 5 / 16, "reserved": 3 / 16, "free": 8 / 16})


class TestStaticBatches:
    LOG = [TraceRequest(0, 3, 2), TraceRequest(1, 5, 6), TraceRequest(2, 2, 1), TraceRequest(3, 9, 3)]

    def test_members_start_together_and_idle_until_the_longest_is_done(self):
        spans = static_batches(self.LOG[:2], 2, ["ana", "bo"])
        assert spans == [
            Span("ana", 0, 1, "waiting"), Span("ana", 1, 2, "prefill"), Span("ana", 2, 3, "decode"),
            Span("ana", 3, 7, "idle"), Span("bo", 1, 2, "prefill"), Span("bo", 2, 7, "decode"),
        ]  # fmt: skip

    def test_the_next_batch_waits_for_the_one_before_it(self):
        spans = static_batches(self.LOG, 2)
        assert [span for span in spans if span.request_id == "r2"] == [
            Span("r2", 2, 7, "waiting"), Span("r2", 7, 8, "prefill"), Span("r2", 8, 10, "idle"),
        ]  # fmt: skip

    def test_utilization_leaves_waiting_out(self):
        assert utilization(static_batches(self.LOG, 2)) == pytest.approx((2 + 6 + 1 + 3) / (12 + 6))
        assert utilization(static_batches(self.LOG, 1)) == 1

    def test_padding_share_is_that_of_the_rectangles(self):
        assert padding_share(self.LOG, 2) == pytest.approx(1 - (3 + 5 + 2 + 9) / (10 + 18))

    @settings(max_examples=60)
    @given(
        st.lists(st.builds(TraceRequest, st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1),
        st.integers(1, 5),
    )
    def test_every_request_gets_its_steps_and_no_batch_overlaps_the_next(self, log, batch_size):
        spans = static_batches(log, batch_size)
        for index, request in enumerate(log):
            own = [span for span in spans if span.request_id == f"r{index}"]
            assert sum(s.stop - s.start for s in own if s.state in ("prefill", "decode")) == request.output_tokens
            assert own[0].start == request.arrival
            assert all(before.stop == after.start for before, after in zip(own, own[1:], strict=False))
        leaves = [max(s.stop for s in spans if s.request_id == f"r{index}") for index in range(len(log))]
        assert leaves == sorted(leaves)
