"""A view of a model in memory: shared weights, its own config, modules and hooks."""

from __future__ import annotations

from copy import deepcopy

from transformers import PreTrainedModel


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares the parameters and buffers of `model`, in eval mode, with its own config, modules and hooks.

    The engine sets the attention implementation of its view without affecting `model`, which may be trained meanwhile.
    In-place changes of weights apply to both; a replaced parameter is replaced in that model only.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return deepcopy(model, shared).eval()
