"""The engine on a tiny model: the contract of `step()`, `abort()` and `generate()`, and what happens when things go wrong."""

import gc
import random
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engines import greedy, poisoned_llm, run
from remembering import Letters
from tiny_models import tiny

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.attention.torch_backend import TorchAttention
from labcore.engine.invariants import IntegrityError
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.models import from_model
from labcore.sampling.beam_search import BeamSearch
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.policy import PriorityWithAging
from labcore.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def loaded(model):
    return from_model(model)


def prompts(*lengths, vocab=100, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab) for _ in range(n)] for n in lengths]


def flat_out(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def test_step_returns_an_output_for_each_request_that_gained_a_token(loaded):
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4, max_num_batched_tokens=8).engine
    short, long = prompts(3, 12)
    engine.add_request("short", short, flat_out(3))
    engine.add_request("long", long, flat_out(2))
    assert [o.request_id for o in engine.step()] == ["short"], "the long prompt has 5 of its 12 tokens"
    assert [o.request_id for o in engine.step()] == ["short", "long"]
    outputs = {o.request_id: o for o in engine.step()}
    assert [len(outputs[i].outputs[0].token_ids) for i in ("short", "long")] == [3, 2]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs.values())
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.check_integrity()


def test_step_of_an_idle_engine_does_nothing(loaded):
    """Case: a loop that was started before the first request came fell over."""
    engine = LLM(loaded, num_blocks=8).engine
    for _ in range(3):
        assert engine.step() == [] and not engine.has_unfinished_requests()
    engine.add_request("r", prompts(3)[0], flat_out(2))
    engine.abort("r")
    assert engine.step() == [] and engine.stats()["num_free_blocks"] == 8
    engine.check_integrity()


def test_outputs_are_cumulative_snapshots_that_later_steps_leave_alone(loaded):
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
    engine.add_request("r", prompts(5)[0], flat_out(6, logprobs=2))
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    for i, output in enumerate(seen):
        completion = output.outputs[0]
        assert len(completion.token_ids) == len(completion.logprobs) == i + 1
        assert completion.token_ids == seen[-1].outputs[0].token_ids[: i + 1]
        assert (completion.finish_reason is None) == (i < 5)
    last = seen[-1].outputs[0]
    assert last.cumulative_logprob == pytest.approx(sum(p[t] for p, t in zip(last.logprobs, last.token_ids, strict=True)))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("budget", [1, 5, 33, 2048])
def test_budget_changes_no_token(model, loaded, budget, chunked):
    asked = prompts(1, 2, 7, 15, 16, 17, 31, 33)
    llm = poisoned_llm(
        loaded, num_blocks=64, block_size=4, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, max_num_seqs=5
    )
    for i, prompt in enumerate(asked):
        llm.engine.add_request(f"r{i}", prompt, flat_out(9))
    done = run(llm.engine)
    for i, prompt in enumerate(asked):
        assert done[f"r{i}"].outputs[0].token_ids == greedy(model, prompt, 9)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_in_a_pool_too_small_for_all_loses_nothing(model, loaded, policy):
    asked = prompts(9, 14, 3, 20, 6, 11)
    llm = poisoned_llm(loaded, num_blocks=12, block_size=4, scheduling_policy=policy)
    for i, prompt in enumerate(asked):
        llm.engine.add_request(f"r{i}", prompt, flat_out(20), priority=i % 3)
    done = run(llm.engine)
    assert llm.engine.stats()["num_preemptions"] > 0
    assert sum(output.metrics.num_preemptions for output in done.values()) == llm.engine.stats()["num_preemptions"]
    for i, prompt in enumerate(asked):
        assert done[f"r{i}"].outputs[0].token_ids == greedy(model, prompt, 20)


def test_sampling_is_the_same_alone_in_a_batch_and_after_preemption(loaded):
    asked = prompts(9, 14, 3, 20)
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=7 + i, max_tokens=16, min_tokens=12, ignore_eos=True,
                       presence_penalty=0.5, frequency_penalty=0.3, logprobs=1)
        for i in range(4)
    ]
    alone = [poisoned_llm(loaded, num_blocks=40, block_size=4).generate(p, q)[0] for p, q in zip(asked, params, strict=True)]
    crowded = poisoned_llm(loaded, num_blocks=11, block_size=4, seed=3)
    together = crowded.generate(asked, params)
    assert crowded.engine.stats()["num_preemptions"] > 0
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(other.outputs[0].logprobs) == 16


def test_seeds_of_requests_without_one_differ_and_an_engine_repeats_itself(loaded):
    prompt, params = prompts(6)[0], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    texts = [
        [o.outputs[0].token_ids for o in LLM(loaded, num_blocks=64, seed=seed).generate([prompt] * 3, params)]
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len({tuple(tokens) for tokens in texts[0]}) == 3


def test_n_samples_come_back_together_in_order_and_are_sampled_independently(loaded):
    llm = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_seqs=3)
    params = SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(prompts(6), params)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3, 4] and output.finished
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
    again = poisoned_llm(loaded, num_blocks=64, block_size=4).generate(prompts(6), params)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    llm.engine.check_integrity()


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("length", [5, 8, 13])
def test_n_samples_share_one_prefill_and_copy_only_its_tail(loaded, length, max_tokens):
    """Length 8 fills its blocks: nothing is copied. The last to write a shared tail owns it alone, so n - 1 copies do."""
    llm = poisoned_llm(loaded, num_blocks=64, block_size=4, enable_prefix_caching=False, record=True)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True)
    engine = llm.engine
    engine.add_request("r", prompts(length)[0], params)
    plans, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda budget: plans.append(schedule(budget)) or plans[-1]
    output = run(engine)["r"]
    assert plans[0].num_scheduled_tokens == {"r/0": length} and all(plan.num_tokens == 4 for plan in plans[1:])
    copies = sum(len(plan.block_copies) for plan in plans)
    assert copies == (3 if length % 4 and max_tokens > 1 else 0)
    for k, completion in enumerate(output.outputs):
        alone = SamplingParams(temperature=1.0, seed=5 + k, max_tokens=max_tokens, ignore_eos=True)
        solo = poisoned_llm(loaded, num_blocks=64, block_size=4).generate(prompts(length), alone)[0]
        assert completion.token_ids == solo.outputs[0].token_ids


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_arrival_times_are_for_metrics_and_change_no_order(model, loaded, policy, urgent):
    """Case: one slot, equal priorities, and the one that was added later says that it arrived earlier."""
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_seqs=1, scheduling_policy=policy).engine
    asked = dict(zip(("r2", "r1", "urgent"), prompts(4, 5, 6), strict=True))
    engine.add_request("r2", asked["r2"], flat_out(30), priority=5, arrival_time=1.0)
    engine.step()
    engine.add_request("r1", asked["r1"], flat_out(30), priority=5, arrival_time=0.0)
    engine.step()
    if urgent:
        engine.add_request("urgent", asked["urgent"], flat_out(2), priority=0, arrival_time=2.0)
    done = run(engine, limit=30 + 30 + 2 + 3)
    stepped_back = [name for name, output in done.items() if output.metrics.num_preemptions]
    assert stepped_back == (["r2"] if urgent and policy == "priority" else [])
    assert list(done).index("r2") < list(done).index("r1") and engine.stats()["num_preemptions"] == len(stepped_back)
    for name, output in done.items():
        assert output.outputs[0].token_ids == greedy(model, asked[name], 2 if name == "urgent" else 30)


@pytest.mark.parametrize("n, others", [(12, 0), (8, 0), (9, 0), (12, 1)])
@pytest.mark.parametrize("caching", [True, False])
def test_n_samples_beyond_the_slots_come_in_waves(loaded, n, others, caching):
    llm = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_seqs=8, enable_prefix_caching=caching)
    for i in range(others):
        llm.engine.add_request(f"other{i}", prompts(7)[0], flat_out(20))
    params = SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    llm.engine.add_request("r", prompts(10)[0], params)
    outputs = run(llm.engine, limit=200)["r"].outputs
    assert [c.index for c in outputs] == list(range(n)) and all(len(c.token_ids) == 5 for c in outputs)
    for k in (0, n - 1):
        alone = SamplingParams(temperature=1.0, seed=3 + k, max_tokens=5, ignore_eos=True)
        solo = poisoned_llm(loaded, num_blocks=64, block_size=4).generate(prompts(10), alone)[0]
        assert outputs[k].token_ids == solo.outputs[0].token_ids


@pytest.mark.parametrize("state", ["waiting", "running", "mid-prefill", "one of n"])
def test_abort_ends_a_request_in_any_state_and_returns_its_output(loaded, state):
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4, max_num_seqs=2, max_num_batched_tokens=10).engine
    first, victim, third = prompts(4, 24, 5)
    engine.add_request("first", first, flat_out(8))
    params = SamplingParams(n=2, temperature=1, max_tokens=8, ignore_eos=True) if state == "one of n" else flat_out(8)
    engine.add_request("victim", victim, params)
    engine.add_request("third", third, flat_out(4))
    for _ in range({"waiting": 0, "mid-prefill": 1, "running": 6, "one of n": 6}[state]):
        engine.step()
    output = engine.abort("victim")
    engine.check_integrity()
    assert output.finished and all(c.finish_reason == "abort" for c in output.outputs)
    assert (len(output.outputs[0].token_ids) > 0) == (state in ("running", "one of n"))
    done = run(engine)
    assert sorted(done) == ["first", "third"]


def test_abort_of_an_unknown_id_is_rejected(loaded):
    engine = LLM(loaded, num_blocks=8).engine
    with pytest.raises(ValueError, match="request_id 'nobody' is not being served"):
        engine.abort("nobody")


@pytest.mark.parametrize("change, message", [
    ({"request_id": ""}, "request_id"),
    ({"request_id": 7}, "request_id"),
    ({"request_id": "taken"}, "request_id 'taken' is in use"),
    ({"prompt_token_ids": []}, "prompt is empty"),
    ({"prompt_token_ids": [1, -1]}, "prompt token 1 is -1"),
    ({"prompt_token_ids": [1, 10**6]}, "prompt token 1 is 1000000; it must be a token id, 0 …"),
    ({"prompt_token_ids": [1.5]}, "prompt token 0 is 1.5"),
    ({"prompt_token_ids": [True]}, "prompt token 0 is True"),
    ({"prompt_token_ids": [1] * 40}, r"prompt has 40 tokens; this engine can hold at most 40 \(max_model_len\)"),
    ({"prompt_token_ids": [1] * 30, "params": SamplingParams(max_tokens=None)}, "needs 10 blocks .*, the pool has 8"),
    ({"params": SamplingParams(stop_token_ids=[10**6])}, "stop_token_ids"),
    ({"params": SamplingParams(stop="x")}, "stop"),
    ({"params": {"temperature": 0}}, "params"),
    ({"priority": 0.5}, "priority"),
    ({"arrival_time": float("nan")}, "arrival_time"),
    ({"arrival_time": "now"}, "arrival_time"),
    ({"cache_salt": None}, "cache_salt is None"),
    ({"cache_salt": "\ud800"}, "cache_salt is '.ud800'; it must be text that can be written as UTF-8"),
    ({"use_prefix_cache": "no"}, "use_prefix_cache is 'no'; it must be True or False"),
    ({"prompt_token_ids": None}, "prompt is None; it must be a list of token ids, 0 …"),
    ({"prompt_token_ids": 5}, "prompt is 5"), ({"prompt_token_ids": "abc"}, "prompt is 'abc'"),
    ({"prompt_token_ids": {3, 1}}, "prompt is {1, 3}"), ({"prompt_token_ids": {1: 2}}, "prompt is {1: 2}"),
])
def test_validation_rejects_a_bad_request_by_name_and_the_others_go_on(model, loaded, change, message):
    engine = poisoned_llm(loaded, num_blocks=8, block_size=4, max_model_len=40).engine
    prompt = prompts(6)[0]
    engine.add_request("taken", prompt, flat_out(8))
    engine.step()
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.add_request(**{"request_id": "new", "prompt_token_ids": [1, 2], "params": flat_out(4)} | change)
    assert engine.stats() == before and engine.request_ids() == ["taken"]
    engine.check_integrity()
    assert run(engine)["taken"].outputs[0].token_ids == greedy(model, prompt, 8)


@pytest.mark.parametrize("length, max_tokens, expected", [
    (30, None, 2), (30, 1, 1), (30, 2, 2), (30, 10, 2), (31, None, 1), (31, 1, 1), (31, 10, 1), (32, 1, None), (33, 1, None),
])
def test_max_model_len_is_never_exceeded(loaded, length, max_tokens, expected):
    llm = poisoned_llm(loaded, num_blocks=16, block_size=4, max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if expected is None:
        with pytest.raises(ValueError, match="max_model_len"):
            llm.generate(prompts(length), params)
    else:
        completion = llm.generate(prompts(length), params)[0].outputs[0]
        assert len(completion.token_ids) == expected and completion.finish_reason == "length"
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_max_model_len_allows_every_position_of_the_model_and_no_more(kind):
    """Learned positions end where their table does: 127 tokens of prompt leave one for the answer, 128 none."""
    model = tiny(kind)
    llm = poisoned_llm(from_model(model), num_blocks=64, block_size=4)
    asked = prompts(120, 127)
    for prompt, room in zip(asked, (8, 1), strict=True):
        completion = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].outputs[0]
        assert completion.token_ids == greedy(model, prompt, room) and completion.finish_reason == "length"
    with pytest.raises(ValueError, match="prompt has 128 tokens; this engine can hold at most 128"):
        llm.generate(prompts(128), flat_out(1))
    llm.engine.check_integrity()


@pytest.mark.parametrize("length", [13 * 4 - 1, 13 * 4])
def test_validation_accepts_a_prompt_that_just_fills_the_pool_and_rejects_one_token_more(loaded, length):
    llm = poisoned_llm(loaded, num_blocks=13, block_size=4, max_model_len=60)
    engine = llm.engine
    engine.add_request("big", [1] * length, flat_out(1))
    engine.add_request("small", [1] * 4, flat_out(1))
    assert sorted(run(engine)) == ["big", "small"]
    with pytest.raises(ValueError, match="needs 14 blocks when finished, the pool has 13"):
        engine.add_request("bigger", [1] * (13 * 4 + 1), flat_out(1))


def test_generate_takes_every_form_of_prompt_and_keeps_the_order(model, loaded):
    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    a, b = prompts(4, 9)
    assert llm.generate(a, flat_out(3))[0].outputs[0].token_ids == greedy(model, a, 3)
    outputs = llm.generate([b, a], [flat_out(5), flat_out(2)])
    assert [o.prompt_token_ids for o in outputs] == [b, a]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 2]
    assert llm.generate([tuple(a)], flat_out(3))[0].outputs[0].token_ids == greedy(model, a, 3)


@pytest.mark.parametrize("asked, options, message", [
    ([], {}, "prompts is empty"),
    ([[1], []], {}, "prompt is empty"),
    (["text"], {}, "no tokenizer"),
    ([[1], 2], {}, r"prompts\[1\] is 2"),
    (None, {}, "prompts is None"),
    (5, {}, "prompts is 5"),
    (b"abc", {}, "prompts is b'abc'"),
    ([b"abc", "d"], {}, r"prompts\[0\] is b'abc'"),
    ({"a": 1}, {}, "prompts is {'a': 1}"),
    ([[1], [2]], {"params": [SamplingParams()]}, "params has 1 entries for 2 prompts"),
    ([[1], [2]], {"priority": [1, 2, 3]}, "priority has 3 entries for 2 prompts"),
])
def test_generate_rejects_a_bad_call_before_anything_is_queued(loaded, asked, options, message):
    llm = LLM(loaded, num_blocks=32)
    with pytest.raises(ValueError, match=message):
        llm.generate(asked, **options)
    assert llm.engine.request_ids() == []


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate(""),
    lambda llm: llm.generate(["a", ""]),
    lambda llm: llm.generate([]),
    lambda llm: llm.generate([[]]),
    lambda llm: llm.generate("?"),
    lambda llm: llm.chat([]),
    lambda llm: llm.chat([[]]),
    lambda llm: llm.chat([{"role": "user", "content": "?"}]),
    lambda llm: llm.engine.add_request("bad", []),
], ids=["''", "a and ''", "[]", "[[]]", "no token", "no message", "an empty chat", "a chat of no token", "no ids"])
def test_validation_rejects_what_is_empty_and_a_running_request_goes_on(model, loaded, call):
    """Case: a tokenizer that adds no token of its own makes nothing of some texts, and one such text ended the server."""

    class Bare(Letters):
        chat_template = "{}"

        def encode(self, text, **options):
            return super().encode(text.replace("?", ""))

        def apply_chat_template(self, messages, **options):
            return self.encode("".join(message["content"] for message in messages))

    llm = poisoned_llm(replace(loaded, tokenizer=Bare()), num_blocks=32, block_size=4)
    with pytest.raises(ValueError, match="empty"):
        call(llm)
    assert llm.engine.request_ids() == []
    prompt = prompts(5)[0]
    llm.engine.add_request("under way", prompt, flat_out(6))
    llm.engine.step()
    with pytest.raises((ValueError, RuntimeError), match="empty|still serves 1 requests"):
        call(llm)
    assert llm.engine.request_ids() == ["under way"]
    assert run(llm.engine)["under way"].outputs[0].token_ids == greedy(model, prompt, 6)


@pytest.mark.parametrize("part", [
    {"block_pool": int}, {"block_pool": object()}, {"scheduler": "x"}, {"prefix_cache": dict}, {"preemption": 3},
])
def test_plugged_in_part_is_rejected_by_what_it_lacks(loaded, part):
    with pytest.raises(ValueError, match=f"{next(iter(part))} is .*it must be a .*missing"):
        LLM(loaded, num_blocks=8, **part)


def test_pool_larger_than_the_memory_is_rejected(loaded):
    with pytest.raises(ValueError, match="GiB, .* are free: lower num_blocks"):
        LLM(loaded, num_blocks=10**10)


@pytest.mark.parametrize("moment", ["while the plan is made", "while tokens are taken", "while a request is added"])
def test_sigint_is_deferred_until_state_is_consistent(loaded, monkeypatch, moment):
    """A real SIGINT, sent in the middle of the bookkeeping: it arrives, and nothing is half done."""
    import os
    import signal

    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    owner, name = {
        "while the plan is made": (llm.engine.scheduler, "_reserve"),
        "while tokens are taken": (llm.engine.scheduler, "commit"),
        "while a request is added": (llm.engine.scheduler, "add"),
    }[moment]
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(4, 9), flat_out(8))
    assert llm.engine.request_ids() == [] and llm.engine.stats()["num_free_blocks"] == 32
    llm.engine.check_integrity()
    assert len(llm.generate(prompts(4), flat_out(3))[0].outputs[0].token_ids) == 3


def test_generate_rejects_to_run_with_requests_that_were_added_by_hand(loaded):
    llm = LLM(loaded, num_blocks=32)
    llm.engine.add_request("mine", [1, 2], flat_out(4))
    with pytest.raises(RuntimeError, match="still serves 1 requests"):
        llm.generate([[1]], flat_out(1))
    assert llm.engine.request_ids() == ["mine"]


@pytest.mark.parametrize("call, message", [
    (lambda llm: llm.generate({"a"}), "prompts is {'a'}"),
    (lambda llm: llm.generate(np.array(3)), "prompts is array"),
    (lambda llm: llm.generate(3), "prompts is 3"),
    (lambda llm: llm.generate("\ud800"), "prompt 0 is '.ud800'; it must be text"),
    (lambda llm: llm.chat([3]), "messages has 3; each conversation must be a list of messages"),
    (lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]), "must be text that can be written as UTF-8"),
    (lambda llm: llm.beam_search([[1]], SamplingParams()), "it must be a BeamSearchParams"),
    (lambda llm: llm.beam_search([[1], [2]], [BeamSearchParams(), None]), "params is None"),
])
def test_validation_rejects_what_is_no_prompt_and_no_search_in_one_line(loaded, call, message):
    tokenizer = SimpleNamespace(chat_template="{}", decode=str, encode=None, apply_chat_template=None)
    llm = poisoned_llm(replace(loaded, tokenizer=tokenizer), num_blocks=32, block_size=4)
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_integrity()


@pytest.mark.parametrize("error", [RuntimeError("the model fell over"), KeyboardInterrupt()])
def test_rollback_of_a_failed_step_loses_no_token(model, loaded, error, monkeypatch):
    asked = prompts(5, 12)
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
    for i, prompt in enumerate(asked):
        engine.add_request(f"r{i}", prompt, flat_out(8))
    engine.step()
    engine.step()

    def fall_over(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "forward", fall_over)
        with pytest.raises(type(error)):
            engine.step()
    engine.check_integrity()
    done = run(engine)
    for i, prompt in enumerate(asked):
        assert done[f"r{i}"].outputs[0].token_ids == greedy(model, prompt, 8)


def test_generate_leaves_no_request_behind_when_it_is_interrupted(loaded, monkeypatch):
    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    steps = iter([None, None])
    forward = llm.engine.runner.model.forward

    def interrupted(*args, **kwargs):
        if next(steps, "stop") == "stop":
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(4, 9), flat_out(8))
    assert llm.engine.request_ids() == [] and llm.engine.stats()["num_free_blocks"] == 32
    llm.engine.check_integrity()
    assert len(llm.generate(prompts(4), flat_out(3))[0].outputs[0].token_ids) == 3


def test_nan_logits_end_their_request_with_an_error_and_the_others_go_on(model, loaded, monkeypatch):
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
    fine, broken = prompts(4, 6)
    engine.add_request("fine", fine, flat_out(4))
    engine.add_request("broken", broken, flat_out(4))
    run_model = engine.runner.run

    def with_nan(plan, requests):
        batch, logits = run_model(plan, requests)
        logits = logits.clone()
        for i, request in enumerate(batch):
            if request.request_id == "broken":
                logits[i] = float("nan")
        return batch, logits

    monkeypatch.setattr(engine.runner, "run", with_nan)
    failed = next(output for output in engine.step() if output.request_id == "broken")
    assert failed.finished and failed.error.startswith("its logits hold NaN")
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == []
    engine.check_integrity()
    assert run(engine)["fine"].outputs[0].token_ids == greedy(model, fine, 4)


def test_stop_ids_and_end_tokens_stop_and_min_tokens_holds_them_off(model, loaded):
    prompt = prompts(6)[0]
    tokens = greedy(model, prompt, 12)
    third = tokens[2]
    first_at = tokens.index(third) + 1
    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    completion = llm.generate(prompt, flat_out(12, stop_token_ids=[third]))[0].outputs[0]
    assert completion.token_ids == tokens[:first_at] and completion.finish_reason == "stop"
    held = llm.generate(prompt, flat_out(12, stop_token_ids=[third], min_tokens=8))[0].outputs[0]
    assert len(held.token_ids) >= 8 and third not in held.token_ids[:7]


def test_stop_at_the_last_allowed_token_counts_as_a_stop(model, loaded):
    prompt = prompts(6)[0]
    first = greedy(model, prompt, 1)[0]
    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    assert llm.generate(prompt, flat_out(1, stop_token_ids=[first]))[0].outputs[0].finish_reason == "stop"


def test_model_may_be_used_by_others_between_two_runs(model, loaded):
    llm = poisoned_llm(loaded, num_blocks=32, block_size=4)
    prompt = prompts(6)[0]
    first = llm.generate(prompt, flat_out(4))[0].outputs[0].token_ids
    model.set_attn_implementation("sdpa")
    assert llm.generate(prompt, flat_out(4))[0].outputs[0].token_ids == first == greedy(model, prompt, 4)


def test_stats_count_what_runs_waits_and_is_free(loaded):
    engine = poisoned_llm(loaded, num_blocks=20, block_size=4, max_num_seqs=2).engine
    for i, prompt in enumerate(prompts(5, 6, 7)):
        engine.add_request(f"r{i}", prompt, flat_out(6))
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_swapped"]) == (2, 1, 0)
    assert stats["num_free_blocks"] == 16 and stats["num_total_blocks"] == 20
    assert stats["kv_cache_usage"] == pytest.approx(0.2)
    run(engine)


def test_invariants_detect_a_leak_a_double_owner_and_a_lost_request(loaded):
    engine = LLM(loaded, num_blocks=20, block_size=4).engine
    engine.add_request("r", prompts(5)[0], flat_out(6))
    engine.step()
    engine.check_integrity()
    leaked = engine.pool.allocate(1)
    with pytest.raises(IntegrityError, match="0 tables list it, its refcount is 1"):
        engine.check_integrity()
    engine.pool.free(leaked)
    engine.scheduler.running[0].table.blocks.append(9)
    with pytest.raises(IntegrityError):
        engine.check_integrity()
    engine.scheduler.running[0].table.blocks.pop()
    request = engine.scheduler.running.pop()
    with pytest.raises(IntegrityError, match="not in exactly one queue"):
        engine.check_integrity()
    engine.scheduler.running.append(request)
    engine.check_integrity()
    said = request.output_token_ids.pop()
    with pytest.raises(IntegrityError, match="request 'r' runs and has nothing to compute"):
        engine.check_integrity()
    request.output_token_ids.append(said)
    engine.check_integrity()


def test_rollback_after_a_part_fails_in_the_middle_of_a_plan_keeps_the_invariants(model, loaded):
    """A learner's pool that raises for the second request, when the first one has its slot already."""
    engine = poisoned_llm(loaded, num_blocks=20, block_size=4).engine
    asked = {"a": [1, 2, 3], "b": [1, 2, 2, 1]}
    for name, prompt in asked.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.step()
    allocate = engine.pool.allocate
    engine.pool.allocate = lambda n: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.pool.allocate = allocate
    engine.check_integrity()
    done = run(engine)
    engine.check_integrity()
    assert all(done[name].outputs[0].token_ids == greedy(model, prompt, 9) for name, prompt in asked.items())


@pytest.mark.parametrize("setting, value, message", [
    ("block_size", 0, "block_size is 0; it must be a whole number, from 1 to 256"),
    ("block_size", 16.0, "block_size"), ("num_blocks", 0, "num_blocks"), ("num_blocks", -3, "num_blocks"),
    ("max_num_seqs", 0, "max_num_seqs"), ("max_num_batched_tokens", 0, "max_num_batched_tokens"),
    ("max_model_len", 1, "max_model_len"), ("max_model_len", 10**7, "positions of this model"),
    ("gpu_memory_utilization", 0, "above 0 and up to 1"), ("gpu_memory_utilization", 1.1, "gpu_memory_utilization"),
    ("kv_cache_memory_gb", float("nan"), "kv_cache_memory_gb"), ("kv_cache_memory_gb", -1, "kv_cache_memory_gb"),
    ("kv_cache_memory_gb", 1e-9, "raise kv_cache_memory_gb"),
    ("scheduling_policy", "lifo", "must be one of 'fcfs', 'priority'"), ("preemption_mode", "drop", "preemption_mode"),
    ("kv_cache_dtype", "int3", "kv_cache_dtype"), ("attention_backend", "cudnn", "attention_backend"),
    ("enable_prefix_caching", 1, "enable_prefix_caching"), ("record", "yes", "record"), ("seed", -1, "seed"),
])
def test_config_rejects_a_bad_setting_by_name_and_range(loaded, setting, value, message):
    with pytest.raises(ValueError, match=message):
        LLM(loaded, **{setting: value})


def test_plugged_in_parts_may_be_classes_or_instances(model, loaded):
    from labcore.attention.torch_backend import TorchAttention
    from labcore.kvcache.blocks import BlockPool
    from labcore.scheduler.preemption import Recompute
    from labcore.scheduler.scheduler import Scheduler

    class MyPool(BlockPool):
        taken = 0

        def allocate(self, n):
            MyPool.taken += n
            return super().allocate(n)

    class MyScheduler(Scheduler):
        steps = 0

        def schedule(self, budget=None):
            MyScheduler.steps += 1
            return super().schedule(budget)

    prompt = prompts(6)[0]
    for pool in (MyPool, MyPool(32, 4)):
        MyPool.taken = MyScheduler.steps = 0
        llm = LLM(loaded, block_pool=pool, block_size=4, scheduler=MyScheduler, attention_backend=TorchAttention,
                  preemption=Recompute())
        assert llm.generate(prompt, flat_out(4))[0].outputs[0].token_ids == greedy(model, prompt, 4)
        assert MyPool.taken == 3 and MyScheduler.steps == 4


def test_plugged_in_table_policy_budget_and_search_run_in_the_engine(model, loaded):
    """Each counts its calls, and no token changes."""
    calls = Counter()

    class MyTable(BlockTable):
        def append(self, n):
            calls["append"] += 1
            return super().append(n)

    class MyPolicy(PriorityWithAging):
        def sort_key(self, request):
            calls["sort_key"] += 1
            return super().sort_key(request)

    class MyBudget(AdaptiveBudget):
        def observe(self, num_tokens, seconds):
            calls["observe"] += 1
            super().observe(num_tokens, seconds)

    class MySearch(BeamSearch):
        def advance(self, candidates):
            calls["advance"] += 1
            return super().advance(candidates)

    prompt = prompts(6)[0]
    llm = LLM(loaded, block_size=4, num_blocks=32, attention_backend=TorchAttention, scheduling_policy="priority",
              max_num_batched_tokens="auto", block_table=MyTable, policy=MyPolicy, budget=MyBudget, beam_search=MySearch)
    assert llm.generate(prompt, flat_out(4))[0].outputs[0].token_ids == greedy(model, prompt, 4)
    llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=3))
    assert set(calls) == {"append", "sort_key", "observe", "advance"} and calls["advance"] == 3
    assert llm.engine.scheduler.policy.aging == llm.engine.config.priority_aging_steps
    llm.engine.check_integrity()
    with pytest.raises(ValueError, match='budget is given; max_num_batched_tokens must be "auto" then, it is 2048'):
        LLM(loaded, budget=MyBudget)
    with pytest.raises(ValueError, match="policy is .*; it must be a Policy or .*: sort_key, can_preempt missing"):
        LLM(loaded, policy=object())


@pytest.mark.parametrize(("parts", "words"), [
    ({"policy": PriorityWithAging}, r"policy is .*PriorityWithAging'>; it must be a class that can be called with \(\): "),
    ({"block_table": BlockTable(BlockPool(4, 4))}, "block_table is .*; it must be a class: the engine makes its own"),
    ({"scheduler": Scheduler.__new__(Scheduler)}, "scheduler is .*; it must be a class"),
])  # fmt: skip
def test_plugged_in_part_that_cannot_be_called_is_rejected_by_field(loaded, parts, words):
    with pytest.raises(ValueError, match=words):
        LLM(loaded, num_blocks=8, **parts)


def test_abort_of_one_of_n_samples_names_its_request(loaded):
    engine = LLM(loaded, num_blocks=32, block_size=4).engine
    engine.add_request("r", prompts(3)[0], SamplingParams(n=2, max_tokens=4))
    with pytest.raises(ValueError, match="request_id 'r/1' is one of the sequences of 'r'; name that request"):
        engine.abort("r/1")
    assert engine.abort("r").finished
    engine.check_integrity()


def test_plugged_in_table_that_raises_is_named(loaded):
    class Broken(BlockTable):
        def append(self, n):
            raise RuntimeError("no more")

    llm = LLM(loaded, block_size=4, num_blocks=32, attention_backend=TorchAttention, block_table=Broken)
    with pytest.raises(RuntimeError, match="no more") as caught:
        llm.generate(prompts(6)[0], flat_out(4))
    assert caught.value.__notes__ == ["raised by the engine's block_table, Broken"]
    llm.engine.check_integrity()


def test_abort_of_requests_that_wait_leaves_nothing_of_them_alive(loaded):
    """Case: queued, forked and searched requests stayed in the queue's heap until those before them had been served."""
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4, max_num_seqs=1).engine
    engine.add_request("runs", [1, 2, 3], flat_out(40))
    engine.step()
    engine.add_request("waits", [1, 2, 4], flat_out(2))
    for i in range(100):
        engine.add_request(f"queued{i}", [2, 3, i + 1], SamplingParams(n=2, seed=0, max_tokens=5))
        engine.add_request(f"beams{i}", [2, 3, i + 1], BeamSearchParams(beam_width=1, max_tokens=4))
        engine.fork("runs", f"forked{i}")
    engine.step()
    waiting = [weakref.ref(r) for r in engine._active.requests.values() if r.request_id not in ("runs", "waits")]
    assert len(waiting) == 400
    for request_id in [name for name in engine.request_ids() if name not in ("runs", "waits")]:
        engine.abort(request_id)
    gc.collect()
    assert sum(ref() is not None for ref in waiting) <= 1 and len(engine.scheduler.waiting._heap) <= 2
    engine.check_integrity()
    assert set(run(engine)) == {"runs", "waits"}
