"""Low-rank adapters in a model: where they are and what they are called. A leaf that every room may import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from agentrl.config.schema import ModelConfig


def add_lora(model: Any, config: ModelConfig) -> None:
    """Puts adapters into `model` where the config says; its own weights are frozen.

    Raises:
        ValueError: no layer of the model has such a name, one is of a kind that can't have an adapter, or one shares
            its weights with another layer: the sum of weights and adapter would then be two tensors, where the engines
            know one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = config.target_modules
    _check_names(model, targets)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  only ever divided by the rank
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        inject_adapter_in_model(lora, model)
    except ValueError as error:
        raise ValueError(f"model.target_modules: {error}") from error
    owners: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    for names in owners.values():
        if len(names) > 1 and any(".base_layer." in name for name in names):
            layers = " and ".join(name.removesuffix(".weight").removesuffix(".base_layer") for name in names)
            raise ValueError(f"model.target_modules: {layers} share their weights and can't have adapters")


def check_lora(config: ModelConfig, path: str) -> None:
    """Finds out whether `add_lora` will work on the model in `path`, without its weights.

    Raises:
        ValueError: see `add_lora`.
    """
    _adapted(config, path)


def adapter_shapes(config: ModelConfig, path: str) -> dict[str, tuple[int, ...]]:
    """The adapters that `add_lora` puts into the model in `path`, as `adapter_tensors` names them."""
    return {name: tuple(tensor.shape) for name, tensor in adapter_tensors(_adapted(config, path))}


def _adapted(config: ModelConfig, path: str) -> Any:
    """The model with its adapters, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        model.tie_weights()
        add_lora(model, config)
    return model


def _check_names(model: Any, targets: str | Sequence[str]) -> None:
    """peft leaves out names that no layer has, as long as there is one that it knows."""
    if isinstance(targets, str):
        return
    layers = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if unknown:
        linear = dict.fromkeys(
            name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        )
        raise ValueError(
            f"model.target_modules: the model has no layer {', '.join(unknown)}: use all-linear, or names of its "
            f"linear layers: {', '.join(linear)}"
        )


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters' weights, under the names that peft gives them in files."""
    from peft.utils import get_peft_model_state_dict

    for name, tensor in get_peft_model_state_dict(model).items():
        yield f"base_model.model.{name}", tensor.detach()
