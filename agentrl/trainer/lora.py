"""A policy with adapters: merged, without them, and them alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.lora import adapter_tensors


def has_lora(model: Any) -> bool:
    """Whether `add_lora` was called."""
    return next(_layers(model), None) is not None


@contextmanager
def without_lora(model: Any) -> Iterator[None]:
    """The policy as it was before adapters learnt anything, for the duration of a block."""
    layers = list(_layers(model))
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for parameter in trained:
            parameter.requires_grad_(True)


def write_adapter(model: Any, directory: Path) -> None:
    """Writes the adapters alone, as peft reads them."""
    from safetensors.torch import save_file

    (config,) = model.peft_config.values()
    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(partial)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapter_tensors(model)}
    save_file(tensors, partial / "adapter_model.safetensors")
    partial.rename(directory)


def _layers(model: Any) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


def merged_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a policy under its own names, those with adapters as the sum of both; one at a time."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        path, found, rest = name.partition(".base_layer.")
        if not found:
            yield name, parameter.detach()
            continue
        tensor = parameter.detach()
        if rest == "weight":
            layer = model.get_submodule(path)
            for adapter in layer.active_adapters:
                tensor = tensor + layer.get_delta_weight(adapter).detach().to(tensor.dtype)
        yield f"{path}.{rest}", tensor
