"""Low-rank adapters on a policy: what is trained, what the engines get, and the policy without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        model.tie_weights()
        add_lora(model, config)


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
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    (config,) = model.peft_config.values()
    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(partial)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        partial / "adapter_model.safetensors",
    )
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
