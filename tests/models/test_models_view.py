"""A model that is served and used by its owner at once: the same weights, and neither disturbs the other."""

from __future__ import annotations

import pytest
import torch
from engines import poisoned_llm
from tiny_models import KINDS, prompt, reference_greedy, tiny

from labcore import LLM, SamplingParams
from labcore.models import from_model
from labcore.models.view import view_of

IDS = prompt(40)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def tokens(llm: LLM, ids: list[int] = IDS) -> list[int]:
    return llm.generate(ids, GREEDY)[0].outputs[0].token_ids


def train(model, steps: int = 1) -> None:
    """Steps of gradient descent that are large enough to change greedy tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_view_shares_every_tensor_and_no_module(kind):
    model = tiny(kind).train()
    view = view_of(model)
    ours, theirs = ([id(t) for t in (*m.parameters(), *m.buffers())] for m in (view, model))
    assert ours == theirs
    assert not {id(module) for module in view.modules()} & {id(module) for module in model.modules()}
    assert view.config is not model.config and view.generation_config is not model.generation_config
    assert model.training and not any(module.training for module in view.modules())


def test_view_keeps_tied_weights_tied():
    view = view_of(tiny("llama", tie_word_embeddings=True))
    assert view.lm_head.weight is view.model.embed_tokens.weight


@pytest.mark.parametrize("handed", ["model", "loaded.model"])
def test_owner_may_generate_and_train_after_and_while_the_engine_lives(handed):
    """Case: "paged_attention() missing 1 required keyword-only argument: 'paged_step'"."""
    model = tiny("llama")
    expected, attention = reference_greedy(model, IDS, 8), model.config._attn_implementation
    loaded = from_model(model)
    llm = LLM(loaded)
    owners = model if handed == "model" else loaded.model
    assert tokens(llm) == expected
    llm.engine.add_request("r", IDS, GREEDY)
    llm.engine.step()
    assert owners.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=8)[0, len(IDS) :].tolist() == expected
    train(owners.train())
    assert owners.training and owners.config._attn_implementation == attention
    llm.engine.abort("r")
    llm.reset_prefix_cache()
    assert tokens(llm) == reference_greedy(owners.eval(), IDS, 8) != expected, "the engine sees what was trained"


def test_owner_has_the_mode_and_the_attention_that_the_model_came_with():
    """Case: a training loop that evaluates in between went on without dropout."""
    model = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.set_attn_implementation("eager")
    expected = tokens(LLM(from_model(tiny("gpt2"))))
    assert tokens(LLM(from_model(model))) == expected, "no dropout in the engine"
    assert model.training and model.config._attn_implementation == "eager"


def test_owner_may_hook_and_train_the_model():
    model = tiny("llama").train()
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append("before"))
    llm = LLM(from_model(model))
    model.model.layers[0].register_forward_hook(lambda *_: seen.append("after"))
    tokens(llm)
    assert "after" not in seen
    train(model)
    assert "after" in seen and all(parameter.grad is not None for parameter in model.parameters())


def test_two_engines_share_a_model_and_step_in_turn():
    """Case: each engine set the attention of the one model again in every step."""
    loaded = from_model(tiny("qwen3"))
    expected = reference_greedy(loaded.model, IDS, 8)
    llms = [LLM(loaded), LLM(loaded, attention_backend="torch", block_size=4)]
    done = []
    for llm in llms:
        llm.engine.add_request("r", IDS, GREEDY)
    while any(llm.engine.has_unfinished_requests() for llm in llms):
        for llm in llms:
            done += [output for output in llm.engine.step() if output.finished]
    assert [output.outputs[0].token_ids for output in done] == [expected, expected]


# Weights that change, and the KV that was computed from the old ones


def change_weights(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)


def test_prefix_cache_is_empty_after_a_reset():
    model = tiny("llama")
    llm = LLM(from_model(model))
    tokens(llm)
    change_weights(model)
    llm.reset_prefix_cache()
    output = llm.generate(IDS, GREEDY)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == reference_greedy(model, IDS, 8)
    assert llm.generate(IDS, GREEDY)[0].num_cached_tokens == 32, "what is computed from here on is found again"
    llm.engine.check_integrity()


def test_prefix_cache_reset_is_refused_while_requests_hold_kv():
    llm = LLM(from_model(tiny("llama")))
    tokens(llm)
    llm.engine.add_request("r", IDS, GREEDY)
    with pytest.raises(RuntimeError, match=r"1 requests are unfinished.*abort\(\) them, before reset_prefix_cache\(\)"):
        llm.reset_prefix_cache()
    llm.engine.step()
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        llm.reset_prefix_cache()
    assert llm.engine.abort("r").num_cached_tokens == 32, "nothing was evicted"
    llm.reset_prefix_cache()
    assert llm.generate(IDS, GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"record": True}])
def test_prefix_cache_reset_goes_with_every_setting(settings):
    model = tiny("llama")
    llm = poisoned_llm(from_model(model), num_blocks=20, **settings)
    for _ in range(2):
        assert tokens(llm) == reference_greedy(model, IDS, 8)
        change_weights(model)
        llm.reset_prefix_cache()
        llm.engine.check_integrity()
