"""Beam search: the algorithm against transformers', and the forks that carry it out in the engine."""

import math
import random
from itertools import count

import pytest
import torch
from engines import its_own_attention, poisoned_llm, run
from remembering import expected_beams, remembering_llm
from tiny_models import prompt, tiny
from transformers import GenerationConfig

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.kvcache.blocks import BlockError, BlockPool, BlockTable
from labcore.models import from_model
from labcore.sampling.beam_search import BeamSearch

PAD = 255


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def loaded_with(model, eos_token_ids):
    import dataclasses

    return dataclasses.replace(from_model(model), eos_token_ids=tuple(eos_token_ids))


def asked(length, seed):
    return [token if token != PAD else 1 for token in prompt(length, seed)]


def by_transformers(model, ids, width, max_tokens, length_penalty, eos):
    """(token ids, score) of each text that transformers' own beam search returns."""
    config = GenerationConfig(
        num_beams=width, num_return_sequences=width, max_new_tokens=max_tokens, do_sample=False, pad_token_id=PAD,
        length_penalty=length_penalty, eos_token_id=eos or None, return_dict_in_generate=True, output_scores=True,
    )
    with its_own_attention(model):
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=config)
    texts = []
    for row in out.sequences[:, len(ids) :].tolist():
        end = next((i for i, token in enumerate(row) if token in eos), len(row) - 1)
        texts.append(row[: end + 1])
    return texts, out.sequences_scores.tolist()


def rescored(model, ids, token_ids):
    """Sum of log-probabilities of `token_ids`, from one plain forward pass over the whole text."""
    with its_own_attention(model):
        logprobs = model(torch.tensor([[*ids, *token_ids]]), use_cache=False).logits[0].float().log_softmax(-1)
    return sum(logprobs[len(ids) - 1 + i, token].item() for i, token in enumerate(token_ids))


SEARCHES = [
    (2, 1.0, []), (4, 1.0, list(range(0, 250, 9))), (3, 0.0, list(range(0, 250, 20))), (5, 2.0, list(range(3, 250, 15))),
]  # fmt: skip


@pytest.mark.parametrize("width, length_penalty, eos", SEARCHES)
@pytest.mark.parametrize("caching", [True, False])
def test_texts_and_scores_are_those_of_transformers_and_of_a_plain_forward_pass(model, width, length_penalty, eos, caching):
    llm = poisoned_llm(loaded_with(model, eos), num_blocks=128, block_size=4, enable_prefix_caching=caching)
    params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=length_penalty)
    prompts = [asked(length, seed) for seed, length in enumerate((5, 8, 13))]
    for i, ids in enumerate(prompts):
        llm.engine.add_request(f"r{i}", ids, params)
    done = run(llm.engine)
    for i, ids in enumerate(prompts):
        texts, scores = by_transformers(model, ids, width, 9, length_penalty, eos)
        outputs = done[f"r{i}"].outputs
        assert [output.token_ids for output in outputs] == texts
        for output, score in zip(outputs, scores, strict=True):
            assert output.cumulative_logprob == pytest.approx(rescored(model, ids, output.token_ids), abs=1e-4)
            assert output.cumulative_logprob / len(output.token_ids) ** length_penalty == pytest.approx(score, abs=1e-4)
            assert output.finish_reason == ("stop" if output.token_ids[-1] in eos else "length")


@pytest.mark.parametrize("num_blocks", [16, 20])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_that_lose_their_blocks_or_slots_find_the_same_texts(model, num_blocks, caching):
    """Two searches and two plain requests in a pool that can't hold them: beams wait for siblings that are recomputed."""
    loaded = loaded_with(model, [])
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [asked(9, seed) for seed in range(4)]
    calm = poisoned_llm(loaded, num_blocks=200, block_size=4)
    expected = [[o.token_ids for o in calm.beam_search(ids, params)[0].outputs] for ids in prompts[:2]]
    llm = poisoned_llm(loaded, num_blocks=num_blocks, block_size=4, max_num_seqs=5, enable_prefix_caching=caching)
    for i in range(2):
        llm.engine.add_request(f"plain{i}", prompts[2 + i], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        llm.engine.add_request(f"beams{i}", prompts[i], params)
    done = run(llm.engine)
    assert llm.engine.stats()["num_preemptions"] > 0
    assert [[o.token_ids for o in done[f"beams{i}"].outputs] for i in range(2)] == expected
    assert all(len(done[f"plain{i}"].outputs[0].token_ids) == 30 for i in range(2))


@pytest.mark.parametrize("budget", [4, 8])
def test_what_a_beam_offered_before_it_was_preempted_is_not_taken_for_the_next_round(model, budget):
    """Beams lose their KV one by one in the middle of a round, and come back a piece at a time."""
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    for seed in range(25):
        dice = random.Random(seed)
        engine = remembering_llm(from_model(model), num_blocks=64, max_num_batched_tokens=budget, max_model_len=60).engine
        asked = [dice.randrange(5) for _ in range(7)]
        engine.add_request("r", asked, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if dice.random() < 0.7:
                engine.scheduler.roll_back([beam for beam in engine.scheduler.running if dice.random() < 0.4])
            engine.check_integrity()
        assert [tuple(text.token_ids) for text in outputs[0].outputs] == expected_beams(asked, params)


@pytest.mark.parametrize("width, prompt_blocks, max_tokens", [(3, 1, 9), (4, 1, 9), (4, 2, 17), (2, 3, 13)])
@pytest.mark.parametrize("cached", [True, False])
def test_a_search_that_is_let_in_ends_although_its_beams_came_back_without_their_common_blocks(
    model, width, prompt_blocks, max_tokens, cached
):
    """In the smallest pool that is let in. An urgent request takes all of it, and then all beams compute their prompt in
    one step, each for itself.
    """
    asked = [i % 5 for i in range(prompt_blocks * 4)]
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    for num_blocks in range(1, 60):
        llm = remembering_llm(
            from_model(model), num_blocks=num_blocks, scheduling_policy="priority", max_model_len=128
        )
        try:
            llm.engine.add_request("beams", asked, params, priority=5, use_prefix_cache=cached)
            break
        except ValueError as refused:
            assert "blocks when finished" in str(refused)
    engine = llm.engine
    engine.scheduler.watermark = 0
    for _ in range(3):
        engine.step()
    urgent = [4 - i % 5 for i in range(num_blocks * 4 - 4)]
    engine.add_request("urgent", urgent, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.scheduler.roll_back(engine.scheduler.running[:])
    done = run(engine, limit=500)
    assert [tuple(text.token_ids) for text in done["beams"].outputs] == expected_beams(asked, params)


def test_a_search_can_be_aborted_between_two_rounds(model):
    llm = poisoned_llm(loaded_with(model, []), num_blocks=64, block_size=4)
    llm.engine.add_request("r", asked(6, 0), BeamSearchParams(beam_width=4, max_tokens=20))
    for _ in range(5):
        (output,) = llm.engine.step()
    assert len(output.outputs) == 4 and not output.finished
    output = llm.engine.abort("r")
    assert output.finished and all(o.finish_reason == "abort" and len(o.token_ids) == 5 for o in output.outputs)
    llm.engine.check_integrity()
    assert llm.engine.stats()["num_free_blocks"] == 64 and not llm.engine.has_unfinished_requests()


def test_forks_copy_only_tails_and_drops_give_every_block_back(model):
    llm = poisoned_llm(loaded_with(model, []), num_blocks=64, block_size=4)
    engine = llm.engine
    engine.add_request("r", asked(15, 0), BeamSearchParams(beam_width=4, max_tokens=12))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
        tables = [request.table.blocks for request in engine.scheduler.running]
        most = max(most, sum(map(len, tables)) - len({block for table in tables for block in table}))
    assert most >= 3 * 3, "four beams share the three full blocks of their prompt"
    assert engine.pool.num_free == 64


@pytest.mark.parametrize("params, message", [
    (BeamSearchParams(beam_width=9, max_tokens=4), "beam_width is 9; it must be from 1 to max_num_seqs, which is 8"),
    (BeamSearchParams(beam_width=8, max_tokens=30), "needs 72 blocks when finished, the pool has 40"),
])
def test_a_search_that_could_never_run_is_refused(model, params, message):
    llm = poisoned_llm(loaded_with(model, []), num_blocks=40, block_size=4, max_num_seqs=8)
    with pytest.raises(ValueError, match=message):
        llm.beam_search([1, 2, 3, 4, 5], params)
    assert llm.engine.request_ids() == []


def test_beams_and_their_names_keep_clear_of_other_requests(model):
    engine = poisoned_llm(loaded_with(model, []), num_blocks=64, block_size=4).engine
    engine.add_request("a/1", [1, 2], SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(ValueError, match="'a/1' is in use"):
        engine.add_request("a", [1, 2], BeamSearchParams(beam_width=2, max_tokens=4))
    engine.add_request("b", [1, 2], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(ValueError, match="'b' is in use"):
        engine.add_request("b/7", [1, 2], SamplingParams(temperature=0, max_tokens=4))
    assert sorted(run(engine)) == ["a/1", "b"]


def test_a_width_of_one_is_greedy(model):
    llm = poisoned_llm(loaded_with(model, []), num_blocks=64, block_size=4)
    greedy = llm.generate(asked(7, 3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    (beam,) = llm.beam_search(asked(7, 3), BeamSearchParams(beam_width=1, max_tokens=8))[0].outputs
    assert beam.token_ids == greedy.outputs[0].token_ids


def test_the_parent_of_a_beam_is_the_one_that_offered_its_token():
    """Case: one candidate too many was returned, and integer division by the expected number named the wrong parent."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5), eos_token_ids=[9], max_tokens=5)
    search.advance([[(1, -0.1), (2, -0.2), (3, -5.0), (9, -6.0), (4, -7.0)]])
    branches = search.advance([[(5, -3.0), (6, -4.0), (7, -4.5)], [(5, -0.1), (6, -0.2), (7, -9.0), (8, -9.0), (9, -9.0)]])
    assert [(branch.parent, branch.token_id) for branch in branches] == [(1, 5), (1, 6)]
    assert [beam.token_ids for beam in search.beams] == [(2, 5), (2, 6)]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(25))
def test_a_search_that_is_wide_enough_finds_the_best_of_all_texts_there_are(seed, length_penalty):
    """A made-up model of 4 tokens and texts of 4: all 256 are counted out, with the sums of their log-probabilities."""
    depth, sums = 4, {(): 0.0}
    for _ in range(depth):
        sums |= {(*text, token): sums[text] + logprob for text in list(sums) for token, logprob in offers_of(text, seed)}
    best = sorted((text for text in sums if len(text) == depth), key=lambda text: -sums[text])
    for width in (1, 3, 64):
        params = BeamSearchParams(beam_width=width, max_tokens=depth, length_penalty=length_penalty)
        search = BeamSearch(params, eos_token_ids=[], max_tokens=depth)
        while not search.done:
            search.advance([offers_of(beam.token_ids, seed) for beam in search.beams])
        found = search.best()
        assert all(text.logprob == pytest.approx(sums[text.token_ids]) for text in found)
        assert [text.score for text in found] == sorted((text.score for text in found), reverse=True)
        assert len({text.token_ids for text in found}) == width
        if width == 64:
            assert [text.token_ids for text in found] == best[:64]


def offers_of(text, seed):
    """All tokens that can come after a text, with their log-probabilities, the likeliest first."""
    dice = random.Random(f"{seed} {text}")
    weights = [dice.random() for _ in range(4)]
    offers = [(token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]
    return sorted(offers, key=lambda offer: -offer[1])


def test_an_end_token_counts_only_among_the_best_of_its_round():
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5), eos_token_ids=[9], max_tokens=5)
    search.advance([[(1, -0.1), (2, -0.2), (9, -0.3), (3, -1.0)]])
    assert search.finished == []
    search.advance([[(9, -0.1), (1, -0.2), (2, -3.0), (3, -3.0)], [(1, -0.3), (2, -2.0), (3, -3.0), (9, -3.0)]])
    assert [text.token_ids for text in search.finished] == [(1, 9)]


@pytest.mark.parametrize("hundred", range(5))
def test_random_beam_selections_keep_refcounts_exact_and_never_free_twice(hundred):
    """Case: block size 4, a prompt of 30, four beams dropped and duplicated at will for 12 rounds in a pool of 40."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        follow_random_beams(random.Random(seed), BlockPool(40, 4))


def follow_random_beams(rng, pool):
    root = BlockTable(pool)
    root.append(30)
    beams = [root] + [root.fork() for _ in range(3)]
    for _ in range(12):
        parents = [rng.choice(beams) for _ in range(4)]
        children = [parent.fork() for parent in parents]
        for beam in beams:
            beam.free()
        for child in children:
            child.copy_on_write()
            child.append(1)
        beams = children
        listed = [block for beam in beams for block in beam.blocks]
        assert all(pool.refcount(block) == listed.count(block) for block in range(40))
        assert sorted([*pool.free_blocks(), *set(listed)]) == list(range(40))
    for beam in beams:
        beam.free()
    assert pool.num_free == 40
    with pytest.raises(BlockError):
        pool.free([0])
    assert pool.num_free == 40


@pytest.mark.parametrize("max_tokens, num_blocks", [(1, 40), (2, 40), (7, 40), (7, 12)])
def test_beam_metrics_are_those_of_the_whole_search(max_tokens, num_blocks):
    """Case: of the first beam. `finished_time` was set while the search went on, and there was no first token of one."""
    engine = remembering_llm(from_model(tiny("qwen3")), num_blocks=num_blocks, max_num_seqs=8).engine
    ticks = count()
    engine._clock = lambda: next(ticks)
    params = BeamSearchParams(beam_width=4, max_tokens=max_tokens)
    for i in range(2 * (num_blocks < 40)):
        engine.add_request(f"r{i}", [3, 3, i], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(6):  # the others are about to want the blocks that the beams get
        engine.step()
    engine.add_request("beams", [0, 1, 2, 3, 0, 1], params, arrival_time=-1.0)
    seen, began, others = [], next(ticks), {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "beams":
                seen.append((output, next(ticks)))
            else:
                others[output.request_id] = output.metrics.num_preemptions
    for output, now in seen[:-1]:
        assert not output.finished and output.metrics.finished_time is None and output.metrics.e2e is None
        assert began < output.metrics.first_token_time < seen[0][1] <= now
    last, now = seen[-1]
    metrics = last.metrics
    assert last.finished and metrics.arrival_time == -1.0
    assert began < metrics.first_scheduled_time < metrics.first_token_time < seen[0][1]
    assert metrics.first_token_time <= metrics.finished_time < now and metrics.finished_time >= now - 4
    assert metrics.num_preemptions + sum(others.values()) == engine.stats()["num_preemptions"]
    assert (metrics.num_preemptions > 1) == (num_blocks == 12)


def test_beam_metrics_of_a_search_that_is_aborted_end_with_it():
    engine = remembering_llm(from_model(tiny("qwen3")), num_blocks=40).engine
    engine.add_request("beams", [0, 1, 2], BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        (output,) = engine.step()
    aborted = engine.abort("beams")
    assert aborted.finished and aborted.metrics.finished_time > output.metrics.first_token_time
    assert aborted.metrics.first_token_time == output.metrics.first_token_time


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("width, max_num_seqs, computed", [(4, 4, 30 + 4 * 23), (4, 5, 30 + 4 * 23), (3, 3, 30 + 3 * 23)])
def test_beam_forks_take_the_slots_of_beams_dropped_in_the_same_round(caching, width, max_num_seqs, computed):
    """Case: forked before the others were dropped, they found no slot, queued and computed their text again: 1,467 tokens."""
    engine = LLM(
        from_model(tiny("llama")), num_blocks=128, block_size=4, max_num_seqs=max_num_seqs, enable_prefix_caching=caching
    ).engine
    schedule, planned = engine.scheduler.schedule, []
    engine.scheduler.schedule = lambda budget: planned.append(schedule(budget)) or planned[-1]
    engine.add_request("beams", prompt(30), BeamSearchParams(beam_width=width, max_tokens=24, ignore_eos=True))
    run(engine)
    assert sum(plan.num_tokens for plan in planned) == computed and len(planned) == 24
