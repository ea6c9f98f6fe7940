"""What the engines get of the policy: under whose names, merged with its adapters or the adapters alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch

from agentrl.lora import adapter_tensors
from agentrl.trainer.lora import merged_tensors

Tensors = Iterable[tuple[str, torch.Tensor]]
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")


def published_tensors(model: Any, dtype: torch.dtype, *, adapters: bool, checkpoint_names: bool) -> Tensors:
    """The tensors to send, tied ones once. Every rank advances them: gathering shards is a collective.

    Args:
        dtype: of what is sent.
        adapters: send LoRA adapters alone, as peft names them in files.
        checkpoint_names: name and cut the weights as the model's files do; else as its parameters are.
    """
    chosen = adapter_tensors(model) if adapters else merged_tensors(model)
    tensors = ((name, tensor.to(dtype)) for name, tensor in chosen)
    return as_in_checkpoint(model, tensors) if checkpoint_names and not adapters else tensors


def as_in_checkpoint(model: Any, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Undoes what transformers did to names and layers when it loaded the model, such as fusing the experts of a
    mixture; a layer of the model at a time, so that memory for no more than one is needed.

    Args:
        tensors: by the names of the model's parameters, those of a layer one after the other.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in groupby(tensors, lambda item: _layer_of(item[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.experts.gate_up_proj`; a tensor outside of layers is its own."""
    found = _LAYER.match(name)
    return found[0] if found else name
