"""The policy as files in Hugging Face format, written beside a training that goes on."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from agentrl.trainer.lora import merged_tensors

Weights = dict[str, torch.Tensor]


def snapshot(model: Any, *, copy: bool = True) -> Weights:
    """The model's weights in main memory, tied ones once.

    Args:
        copy: whether they have to stay as they are while the model trains on.
    """
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    # Sums of weights and adapters are made one at a time: together they would fill the device.
    tensors = chain(merged_tensors(model), buffers)
    return {name: tensor.detach().to("cpu", copy=copy) for name, tensor in tensors}


def write_policy(model: Any, weights: Weights, directory: Path, tokenizer: Any = None) -> None:
    """Writes `weights` as a model like `model`, whose own weights may change meanwhile, and the tokenizer beside them.
    The files appear in `directory` all at once."""
    partial = directory.with_name(f"{directory.name}.partial")
    with torch.device("meta"):
        shape = type(model)(deepcopy(model.config))
    shape.set_attn_implementation("sdpa")
    # Some models name the tokens that end a turn only there.
    shape.generation_config = deepcopy(model.generation_config)
    shape.save_pretrained(partial, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    partial.rename(directory)
