"""A second object for a model that is in memory: the same weights, everything else of its own."""

from __future__ import annotations

from copy import deepcopy

from transformers import PreTrainedModel


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model over the very parameters and buffers of `model`, in eval mode, with its own config, modules and hooks.

    So an engine can choose how its view attends while the owner trains `model`, or generates with it. Weights that are
    changed in place change for both; a parameter that is replaced by another one is replaced in that model alone.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return deepcopy(model, shared).eval()
