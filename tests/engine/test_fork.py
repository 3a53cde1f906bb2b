"""Forks of requests that are being served: nothing is copied before it must be, and each goes on as if it were alone."""

import dataclasses
import random

import pytest
import torch
from engines import greedy, its_own_attention, poisoned_llm, run
from tiny_models import prompt, reference_greedy, tiny
from tiny_tokenizers import BYTES

from labcore import BeamSearchParams, SamplingParams
from labcore.models import from_model
from labcore.request import Request, RequestStatus
from labcore.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def loaded(model):
    return from_model(model)


def flat_out(max_tokens, **options):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options)


def by_plain_forward(model, ids, said, params, seed):
    """What a request says after `ids` and `said`, drawn from one plain forward pass a token."""
    request = Request("reference", list(ids), params, arrival=0, max_tokens=params.max_tokens, seed=seed)
    request.output_token_ids = list(said)
    sampler = Sampler([])
    with its_own_attention(model):
        while len(request.output_token_ids) < params.max_tokens:
            logits = model(torch.tensor([[*ids, *request.output_token_ids]]), use_cache=False).logits[0, -1:]
            request.output_token_ids.append(sampler(logits.float(), [request])[0].token_id)
    return request.output_token_ids


def request_of(engine, request_id):
    scheduler = engine.scheduler
    everybody = [*scheduler.running, *scheduler.waiting_requests()]
    return next(request for request in everybody if request.request_id == request_id)


def tokens(output, index=0):
    return output.outputs[index].token_ids


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 9])
def test_fork_of_a_greedy_request_equals_its_parent_and_transformers(kind, caching, moment):
    """The tail is full after 7 + 1 tokens of KV, partly filled at the other moments."""
    model, ids = tiny(kind), prompt(7)
    engine = poisoned_llm(from_model(model), num_blocks=16, block_size=4, enable_prefix_caching=caching).engine
    engine.add_request("parent", ids, flat_out(12))
    for _ in range(moment):
        engine.step()
    engine.fork("parent", "child")
    engine.check_integrity()
    done = run(engine)
    assert tokens(done["child"]) == tokens(done["parent"]) == reference_greedy(model, ids, 12)
    assert done["child"].outputs[0].finish_reason == "length" and done["child"].prompt_token_ids == ids


@pytest.mark.parametrize("moment, tail_is_full", [(1, False), (2, True), (3, False)])
def test_fork_takes_no_block_and_copies_a_tail_once_when_it_is_written(loaded, moment, tail_is_full):
    engine = poisoned_llm(loaded, num_blocks=16, block_size=4, record=True).engine
    engine.add_request("parent", prompt(7), flat_out(12))
    for _ in range(moment):
        engine.step()
    free = engine.pool.num_free
    engine.fork("parent", "child")
    parent, child = request_of(engine, "parent"), request_of(engine, "child")
    assert engine.pool.num_free == free
    assert child.table.blocks == parent.table.blocks and child.num_computed_tokens == parent.num_computed_tokens
    assert all(engine.pool.refcount(block) == 2 for block in parent.table.blocks)
    before = list(parent.table.blocks)
    engine.step()
    copies = [event.blocks for event in engine.recorder.events() if event.kind == "copy_on_write"]
    assert len(copies) == (0 if tail_is_full else 1)
    shared = before if tail_is_full else before[:-1]
    assert parent.table.blocks[: len(shared)] == child.table.blocks[: len(shared)] == shared
    assert all(engine.pool.refcount(block) == 2 for block in shared)
    assert set(parent.table.blocks[len(shared) :]).isdisjoint(child.table.blocks[len(shared) :])
    engine.check_integrity()
    run(engine)


@pytest.mark.parametrize("num_blocks", [32, 7])
def test_fork_samples_independently_and_the_same_in_a_pool_of_any_size(model, loaded, num_blocks):
    params = flat_out(14, temperature=1.0, seed=3)
    engine = poisoned_llm(loaded, num_blocks=num_blocks, block_size=4).engine
    engine.add_request("parent", prompt(6), params)
    for _ in range(5):
        engine.step()
    said = list(request_of(engine, "parent").output_token_ids)
    engine.fork("parent", "drawn anew")
    engine.fork("parent", "seeded", seed=8)
    engine.fork("parent", "its twin", seed=3)
    engine.fork("parent", "sure of itself", temperature=0)
    own_seed = request_of(engine, "drawn anew").seed
    done = run(engine)
    assert (engine.stats()["num_preemptions"] > 0) == (num_blocks == 7)
    for name, temperature, seed in (("drawn anew", 1.0, own_seed), ("seeded", 1.0, 8), ("sure of itself", 0, 0)):
        expected = by_plain_forward(model, prompt(6), said, flat_out(14, temperature=temperature), seed)
        assert tokens(done[name]) == expected
        assert tokens(done[name])[:5] == said and tokens(done[name]) != tokens(done["parent"])
    assert tokens(done["its twin"]) == tokens(done["parent"])


def test_fork_of_a_fork_and_many_of_one_parent(model, loaded):
    engine = poisoned_llm(loaded, num_blocks=24, block_size=4).engine
    engine.add_request("0", prompt(9), flat_out(16))
    engine.step()
    for generation in range(1, 6):
        engine.fork(str(generation - 1), str(generation))
        engine.fork("0", f"0 at {generation}")
        engine.step()
        engine.check_integrity()
    done = run(engine)
    assert len(done) == 11 and all(tokens(output) == greedy(model, prompt(9), 16) for output in done.values())


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "preempted", "running, every slot taken"])
@pytest.mark.parametrize("caching", [True, False])
def test_fork_of_a_parent_in_any_state(model, loaded, state, caching):
    slots, blocks = (2, 32) if state == "running, every slot taken" else (8, 9 if state == "preempted" else 32)
    engine = poisoned_llm(
        loaded, num_blocks=blocks, block_size=4, max_num_seqs=slots, max_num_batched_tokens=8, enable_prefix_caching=caching
    ).engine
    first, ids = prompt(9, seed=1), prompt(13, seed=2)
    engine.add_request("first", first, flat_out(14))
    engine.add_request("parent", ids, flat_out(10))
    if state == "mid-prefill":
        engine.step()
        engine.step()
        assert 0 < request_of(engine, "parent").num_computed_tokens < 13
    elif state == "preempted":
        while engine.stats()["num_preemptions"] == 0:
            engine.step()
        assert request_of(engine, "parent").output_token_ids
    elif state != "waiting":
        for _ in range(5):
            engine.step()
    parent = request_of(engine, "parent")
    running = parent.status is RequestStatus.RUNNING
    assert running == (state in ("mid-prefill", "running, every slot taken"))
    engine.fork("parent", "child")
    engine.check_integrity()
    child = request_of(engine, "child")
    assert (child.status is RequestStatus.RUNNING) == (state == "mid-prefill")
    assert child.output_token_ids == parent.output_token_ids
    done = run(engine)
    assert tokens(done["parent"]) == tokens(done["child"]) == greedy(model, ids, 10)
    assert tokens(done["first"]) == greedy(model, first, 14)


@pytest.mark.parametrize("who", ["parent", "child"])
@pytest.mark.parametrize("steps_between", [0, 1, 2])
def test_fork_goes_on_when_the_other_is_aborted(model, loaded, who, steps_between):
    engine = poisoned_llm(loaded, num_blocks=16, block_size=4).engine
    engine.add_request("parent", prompt(7), flat_out(12))
    for _ in range(3):
        engine.step()
    engine.fork("parent", "child")
    for _ in range(steps_between):
        engine.step()
    output = engine.abort(who)
    engine.check_integrity()
    assert tokens(output) == greedy(model, prompt(7), 3 + steps_between) and output.outputs[0].finish_reason == "abort"
    (other,) = run(engine).values()
    assert other.request_id != who and tokens(other) == greedy(model, prompt(7), 12)


def test_fork_before_a_failed_step_loses_no_token(model, loaded, monkeypatch):
    """The step has planned the copy of the shared tail, and may have made it or not."""
    engine = poisoned_llm(loaded, num_blocks=16, block_size=4, max_num_batched_tokens=1).engine
    engine.add_request("parent", prompt(2), flat_out(12))
    for _ in range(4):
        engine.step()
    engine.fork("parent", "child")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.check_integrity()
    done = run(engine)
    assert tokens(done["child"]) == tokens(done["parent"]) == greedy(model, prompt(2), 12)


def test_fork_of_one_of_n_samples_leaves_its_group_as_it_was(model, loaded):
    params = flat_out(10, temperature=1.0, n=3, seed=5)
    calm = poisoned_llm(loaded, num_blocks=32, block_size=4).generate(prompt(6), params)[0]
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4, max_num_batched_tokens=4).engine
    engine.add_request("r", prompt(6), params)
    engine.fork("r/2", "early")  # still a pending sibling, which waits for its owner's prompt
    engine.fork("r/0", "owner's")
    for _ in range(6):
        engine.step()
        engine.check_integrity()
    said = list(request_of(engine, "r/1").output_token_ids)
    engine.fork("r/1", "child", temperature=0)
    assert request_of(engine, "child").params.n == 1
    done = run(engine)
    assert [o.token_ids for o in done["r"].outputs] == [o.token_ids for o in calm.outputs]
    assert said and tokens(done["child"]) == by_plain_forward(model, prompt(6), said, flat_out(10), 0)
    assert [len(done[name].outputs) for name in ("early", "owner's", "child")] == [1, 1, 1]
    assert len({tuple(tokens(done[name])) for name in ("early", "owner's")} | {tuple(o.token_ids) for o in calm.outputs}) == 5


@pytest.mark.parametrize("asked, message", [
    ({"request_id": "nobody"}, "request_id 'nobody' is not being served; 4 requests are"),
    ({"request_id": "gone"}, "request_id 'gone' is not being served"),
    ({"request_id": ["parent"]}, r"request_id \['parent'\] is not being served"),
    ({"request_id": "three"}, "request_id 'three' stands for several continuations; fork one of them: 'three/0', 'three/1'"),
    ({"request_id": "three/3"}, "request_id 'three/3' is not being served"),
    ({"request_id": "beams"}, "request_id 'beams' is a beam search"),
    ({"new_id": ""}, "new_id is ''; it must be a string that is not empty"),
    ({"new_id": 7}, "new_id is 7; it must be a string"),
    ({"new_id": "parent"}, "new_id 'parent' is in use"),
    ({"new_id": "three/1"}, "new_id 'three/1' is in use"),
    ({"new_id": "beams/9"}, "new_id 'beams' is in use"),
    ({"temperature": -1}, "temperature is -1; it must be a number, 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
])  # fmt: skip
def test_fork_is_rejected_by_name_and_nothing_changes(model, loaded, asked, message):
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4).engine
    engine.add_request("gone", prompt(3), flat_out(1))
    engine.add_request("parent", prompt(5), flat_out(8))
    engine.add_request("three", prompt(5), flat_out(8, temperature=1.0, n=3))
    engine.add_request("beams", prompt(5), BeamSearchParams(beam_width=3, max_tokens=8))
    engine.add_request("last", prompt(6), flat_out(8, temperature=1.0))
    for _ in range(3):
        engine.step()
    before, ids = engine.stats(), engine.request_ids()
    with pytest.raises(ValueError, match=message):
        engine.fork(**{"request_id": "parent", "new_id": "child"} | asked)
    assert engine.stats() == before and engine.request_ids() == ids
    engine.check_integrity()
    engine.add_request("next", prompt(4), flat_out(2, temperature=1.0))
    seed = request_of(engine, "next").seed
    other = poisoned_llm(loaded, num_blocks=64, block_size=4).engine
    for i in range(8):
        other.add_request(str(i), prompt(3), flat_out(1))
    assert seed == request_of(other, "7").seed, "a refused fork takes no place in the order of arrival"
    run(engine)


def test_fork_of_a_single_beam_is_rejected(loaded):
    engine = poisoned_llm(loaded, num_blocks=64, block_size=4).engine
    engine.add_request("beams", prompt(5), BeamSearchParams(beam_width=3, max_tokens=8))
    for _ in range(4):
        engine.step()
        for beam in list(engine.scheduler.running):
            with pytest.raises(ValueError, match=f"request_id '{beam.request_id}' is a beam search"):
                engine.fork(beam.request_id, "child")
    run(engine)


def test_fork_leaves_the_tokens_of_both_in_the_prefix_cache(loaded):
    """Each publishes its own blocks behind the shared ones; a child that wrote into its parent's chain would not."""
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
    engine.add_request("parent", prompt(6), flat_out(14))
    for _ in range(4):
        engine.step()
    engine.fork("parent", "child", temperature=1.5, seed=1)
    said = {name: tokens(output) for name, output in run(engine).items()}
    assert said["parent"] != said["child"]
    for name, text in said.items():
        engine.add_request(f"after {name}", prompt(6) + text, flat_out(2))
    done = run(engine)
    assert [done[f"after {name}"].num_cached_tokens for name in said] == [16, 16], "of 20 tokens, the last has no KV"


def test_fork_continues_text_and_logprobs_of_its_parent(loaded):
    """Every token is a byte or two, so that a character is often half said when the fork comes."""
    loaded = dataclasses.replace(loaded, tokenizer=BYTES)
    params = flat_out(24, temperature=2.0, seed=11, logprobs=2)
    alone = poisoned_llm(loaded, num_blocks=32, block_size=4).generate(prompt(6), params)[0].outputs[0]
    for moment in range(1, 24, 3):
        engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
        engine.add_request("parent", prompt(6), params)
        for _ in range(moment):
            engine.step()
        engine.fork("parent", "twin", seed=11)
        engine.fork("parent", "other")
        done = {name: output.outputs[0] for name, output in run(engine).items()}
        assert done["twin"].text == done["parent"].text == alone.text
        assert [set(p) for p in done["twin"].logprobs] == [set(p) for p in alone.logprobs]
        assert done["twin"].cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-4)
        other = done["other"]
        assert other.logprobs[:moment] == done["parent"].logprobs[:moment] and len(other.logprobs) == 24
        assert other.cumulative_logprob == pytest.approx(
            sum(p[t] for p, t in zip(other.logprobs, other.token_ids, strict=True)), abs=1e-4
        )


def test_fork_has_metrics_arrival_and_counters_of_its_own(loaded):
    engine = poisoned_llm(
        loaded, num_blocks=32, block_size=4, max_num_seqs=2, scheduling_policy="priority", priority_aging_steps=4
    ).engine
    engine.add_request("parent", prompt(5), flat_out(12), priority=1)
    engine.add_request("beside", prompt(5), flat_out(3), priority=1)
    engine.step()
    engine.step()
    engine.add_request("earlier", prompt(5), flat_out(3), priority=1)
    engine.fork("parent", "child")
    parent, child = request_of(engine, "parent"), request_of(engine, "child")
    assert [request.request_id for request in engine.scheduler.waiting] == ["earlier", "child"]
    assert child.priority == 1 and child.arrival_step == 2 and child.metrics.arrival_time > parent.metrics.arrival_time
    done = run(engine)
    metrics = done["child"].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.arrival_time > done["parent"].metrics.first_token_time
    assert done["child"].num_cached_tokens <= len(done["child"].prompt_token_ids)


def test_fork_changes_no_output_that_was_returned(loaded):
    engine = poisoned_llm(loaded, num_blocks=32, block_size=4).engine
    engine.add_request("parent", prompt(5), flat_out(8, logprobs=1))
    (output,) = engine.step()
    engine.fork("parent", "child", temperature=1.0)
    outputs = {o.request_id: o for o in engine.step()}
    assert [len(tokens(outputs[name])) for name in ("parent", "child")] == [2, 2]
    assert len(tokens(output)) == len(output.outputs[0].logprobs) == 1
    run(engine)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_fork_in_any_mix_of_requests_and_aborts_keeps_invariants_and_tokens(model, loaded, seed):
    """A pool that can't hold them all: forks come while others step back, and children are forked and aborted in turn."""
    dice = random.Random(seed)
    engine = poisoned_llm(
        loaded, num_blocks=14, block_size=dice.choice([1, 2, 4]) if seed % 3 else 4, max_num_seqs=5, seed=seed,
        max_num_batched_tokens=dice.choice([7, 64]), enable_prefix_caching=seed % 2 == 0,
        max_model_len=14 if seed % 3 else 40,
    ).engine  # fmt: skip
    longest = engine.config.max_model_len
    texts, done = {}, {}
    for step in range(300):
        if step < 60 and len(engine.request_ids()) < 9 and dice.random() < 0.5:
            ids = prompt(dice.randint(1, longest // 3), seed=step)
            engine.add_request(f"r{step}", ids, flat_out(dice.randint(1, longest // 2)))
            texts[f"r{step}"] = ids
        if step < 60 and engine.request_ids() and dice.random() < 0.4:
            parent = dice.choice(engine.request_ids())
            engine.fork(parent, f"f{step}")
            texts[f"f{step}"] = texts[parent]
            engine.check_integrity()
        if engine.request_ids() and dice.random() < 0.1:
            name = dice.choice(engine.request_ids())
            done[name] = engine.abort(name)
            engine.check_integrity()
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.check_integrity()
        if step >= 60 and not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests() and engine.pool.num_free == engine.pool.num_blocks
    assert set(done) == set(texts) and sum(name.startswith("f") for name in done) > 5
    for name, output in done.items():
        assert tokens(output) == greedy(model, texts[name], longest)[: len(tokens(output))]
