"""LLM, the offline interface: loads a model, builds an engine, generates text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import count
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from labcore.attention.backend import AttentionBackend
from labcore.attention.select import select_backend
from labcore.config import EngineConfig
from labcore.engine.build import build_engine
from labcore.engine.engine import Params
from labcore.engine.signals import interruptible
from labcore.engine.validation import check_text
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import PrefixCache
from labcore.models import LoadedModel, load
from labcore.models.probe import first_line
from labcore.outputs import RequestOutput
from labcore.sampling.beam_search import BeamSearch
from labcore.sampling_params import BeamSearchParams, SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.scheduler.chunking import ChunkPolicy
from labcore.scheduler.policy import Policy
from labcore.scheduler.preemption import Preemption
from labcore.scheduler.scheduler import Scheduler

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class LLM:
    """A model and its engine: `generate`, `chat`, `beam_search`.

    model               "smollm2-135m", a local folder, a Hugging Face id, or a `LoadedModel`
    attention_backend   "auto", "torch", "triton", or an `AttentionBackend`; on a CPU the Triton
                        kernels are interpreted: correct, and very slow
    block_pool, block_table, prefix_cache, kv_cache_manager, scheduler, preemption, chunking, policy, budget, beam_search
                        a pluggable part, as a class or an instance, in place of labcore's; see `labcore.engine.build`
    settings            fields of `EngineConfig`

    A model in memory (`labcore.models.from_model`) stays its owner's: the engine runs a view of its own over the same weights.
    After changing weights in place, call `reset_prefix_cache()`, or requests reuse KV of the old weights.

    Raises ValueError for a bad setting or a model that can't be served, and ModelError if it can't be loaded.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        *,
        attention_backend: str | AttentionBackend | type[AttentionBackend] = "auto",
        block_pool: BlockPool | type[BlockPool] | None = None,
        block_table: type[BlockTable] | None = None,
        kv_cache_manager: type[KVCacheManager] | None = None,
        scheduler: type[Scheduler] | None = None,
        prefix_cache: PrefixCache | type[PrefixCache] | None = None,
        preemption: Preemption | type[Preemption] | None = None,
        chunking: ChunkPolicy | type[ChunkPolicy] | None = None,
        policy: Policy | type[Policy] | None = None,
        budget: AdaptiveBudget | type[AdaptiveBudget] | None = None,
        beam_search: type[BeamSearch] | None = None,
        **settings: Any,
    ) -> None:
        name = attention_backend if isinstance(attention_backend, str) else "custom"
        config = EngineConfig(attention_backend=name, **settings)
        if isinstance(model, LoadedModel):
            loaded = model
        else:
            loaded = load(model, config.device, config.dtype, config.trust_remote_code)
        self.engine = build_engine(
            config,
            loaded,
            backend=select_backend(attention_backend, loaded.model.device),
            block_pool=block_pool,
            block_table=block_table,
            kv_cache_manager=kv_cache_manager,
            scheduler=scheduler,
            prefix_cache=prefix_cache,
            preemption=preemption,
            chunking=chunking,
            policy=policy,
            budget=budget,
            beam_search=beam_search,
        )
        self.tokenizer = loaded.tokenizer
        self._ids = count()

    def generate(
        self,
        prompts: Prompts,
        params: Params | Sequence[Params] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once. Returns one output per prompt, in their order.

        prompts    a text, a list of token ids, or a list of either. A text that begins with the BOS token gets no second one
        params     one for all, or one per prompt
        priority   likewise; used under scheduling_policy="priority"
        A prompt that fails alone (its logits are NaN, the tokenizer raises on its tokens) has an output, too: with
        finish_reason "error" and the reason in `error`. The others are not affected.
        Raises ValueError, with nothing queued, if any prompt is bad, and EngineBusy if another thread uses the engine. If it
        is interrupted, all of its requests are aborted.
        """
        prompts = as_list_of_prompts(prompts)
        params = one_each("params", SamplingParams() if params is None else params, len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        with self.engine.exclusive():
            with interruptible():
                tokens = [self._encode(i, prompt) for i, prompt in enumerate(prompts)]
            outputs = self._serve(tokens, params, priorities, use_tqdm)
        for output, prompt in zip(outputs, prompts, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate the answer to a conversation, or to a list of them.

        A message is {"role": "system" | "user" | "assistant", "content": …}.

        Raises ValueError for an empty conversation, a message without role or content, a model without a template, and
        messages that its template rejects.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise ValueError(f"messages is {messages!r}; it must be a list of messages, each with a role and a content.")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if not conversations:
            raise ValueError("messages is empty; it must have at least 1 message with a role and a content.")
        params = one_each("params", SamplingParams() if params is None else params, len(conversations))
        with self.engine.exclusive():
            with interruptible():
                tokens = [self.chat_tokens(conversation) for conversation in conversations]
            return self._serve(tokens, params, [0] * len(tokens), use_tqdm)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | Sequence[BeamSearchParams] | None = None, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Beam search. `outputs` holds the hypotheses of a prompt, best first.

        An output's `cumulative_logprob` is the sum of its tokens' log-probabilities; the order is that of
        `cumulative_logprob / len(token_ids) ** length_penalty`. Prompts and errors are those of `generate`.
        """
        params = BeamSearchParams() if params is None else params
        for one in [params] if not isinstance(params, Sequence) else params:
            if not isinstance(one, BeamSearchParams):
                raise ValueError(f"params is {one!r}; it must be a BeamSearchParams; generate() takes the other kind.")
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Evict every cached prefix. Call it after weights were changed in place; see `Engine.reset_prefix_cache`."""
        self.engine.reset_prefix_cache()

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation under the model's chat template, ready for the assistant's turn."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("messages given, but this model has no chat template; use generate() with a plain prompt.")
        if not messages:
            raise ValueError("messages is empty; it must have at least 1 message with a role and a content.")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise ValueError(f"messages has {messages!r}; each conversation must be a list of messages.")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(f"messages[{i}] is {message!r}; it must have a 'role' and a 'content', both text.")
            check_text(f"messages[{i}]['content']", message["content"])
        try:
            return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(
                f"messages can't be put into this model's chat template ({type(error).__name__}: {first_line(error)}) — change "
                "them (some templates take no system message, or want user and assistant in turn), or use generate()."
            ) from error

    def prompt_tokens(self, prompt: str, name: str = "prompt") -> list[int]:
        """The token ids of a text, with the tokenizer's special tokens.

        BOS is added once, also if the text begins with it, as a chat template's does.
        name: of the prompt in errors. Raises ValueError for an empty text, for no text, and for a model without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(f"{name} is a text, but this model has no tokenizer; pass token ids.")
        if not prompt:
            raise ValueError(f"{name} is empty; it must have at least 1 character.")
        check_text(name, prompt)
        return encode_once(self.tokenizer, prompt)

    def _encode(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        return self.prompt_tokens(prompt, f"prompt {index}") if isinstance(prompt, str) else list(prompt)

    def _serve(
        self, prompts: list[list[int]], params: list[Params], priorities: list[int], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Call inside `Engine.exclusive`: no other thread comes in between, and only a step is interrupted."""
        engine = self.engine
        if engine.has_unfinished_requests():
            raise RuntimeError(
                f"the engine still serves {len(engine.request_ids())} requests that were added by hand: step() until they "
                "are done, or abort() them, before generate() or chat()."
            )
        ids = [f"generate-{next(self._ids)}" for _ in prompts]
        for request in zip(ids, prompts, params, priorities, strict=True):
            engine.check_request(*request)
        done: dict[str, RequestOutput] = {}
        try:
            for request in zip(ids, prompts, params, priorities, strict=True):
                engine.add_request(*request)
            with tqdm(total=len(ids), disable=not use_tqdm, desc="requests", dynamic_ncols=True) as bar:
                while len(done) < len(ids):
                    finished = [output for output in engine.step() if output.finished]
                    done.update((output.request_id, output) for output in finished)
                    with interruptible():  # between two steps: one that plans nothing runs no model
                        bar.update(len(finished))
        finally:
            for request_id in engine.request_ids():
                engine.abort(request_id)
        return [done[request_id] for request_id in ids]


def encode_once(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text with special tokens, but no second BOS if the text begins with one."""
    token_ids, bos = tokenizer.encode(text), getattr(tokenizer, "bos_token_id", None)
    if bos is None or token_ids[:2] != [bos, bos]:
        return token_ids
    written = tokenizer.encode(text, add_special_tokens=False)
    return token_ids[num_leading(bos, token_ids) - num_leading(bos, written) :]


def num_leading(token_id: int, token_ids: Sequence[int]) -> int:
    """Length of the run of `token_id` at the beginning."""
    return next((i for i, other in enumerate(token_ids) if other != token_id), len(token_ids))


def as_list_of_prompts(prompts: Prompts) -> list[str | Sequence[int]]:
    """Prompts as a list: one text, or one list of token ids, becomes a list of one. Raises ValueError for an empty list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping, Set)) or not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(f"prompts is {prompts!r}; it must be a text, token ids, or a list of either.")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty; it must be a text, token ids, or a list of either with at least 1 entry.")
    if all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    if not any(isinstance(prompt, (str, Sequence)) for prompt in prompts):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, bytes) or not isinstance(prompt, (str, Sequence)):
            raise ValueError(f"prompts[{i}] is {prompt!r}; each prompt must be a text or a list of token ids.")
    return prompts


def one_each(name: str, value: Any, n: int) -> list:
    """`value` n times, or its n entries if it is a sequence. Raises ValueError if it has not n entries."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return [value] * n
    if len(value) != n:
        raise ValueError(f"{name} has {len(value)} entries for {n} prompts; pass one for all, or one per prompt.")
    return list(value)
