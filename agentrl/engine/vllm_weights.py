"""New weights inside a worker of vLLM: out of agentrl's buckets, into the running model, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from agentrl.engine.checkpoint import checkpoint_shapes
from agentrl.engine.vllm_messages import ABANDON, COMPLETE
from agentrl.record import WeightTransferError
from agentrl.record.codec import decode
from agentrl.record.protocols import Bucket, WeightGroup
from agentrl.weights.receiver import LoadingReceiver
from agentrl.weights.sources import BucketSource


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """A `record.protocols.WeightGroup`, as hexadecimal MessagePack: it also travels as JSON."""

    group: str


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A step of an update: a `record.protocols.Bucket` as hexadecimal MessagePack, or a word of `vllm_messages`."""

    bucket: str


class ModelUpdate:
    """Receives what `agentrl.weights` sends, by shared memory, files or a process group, into a worker's model.

    Tensors come under the names of the checkpoint and go through the model's own loader, which knows fused and sharded
    layers; vLLM's layerwise reload puts them where the running kernels expect them. Whoever hands in buckets does it
    where vLLM's own loading happens: with its config set.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.model = model
        self.model_config = vllm_config.model_config
        self.parallel_config = vllm_config.parallel_config
        self._receiver = LoadingReceiver(
            self._load, BucketSource(device), checkpoint_shapes(self.model_config.model), device=device
        )
        self._loaded: set[str] = set()
        self._parameters: set[str] = set()
        self._updating = False

    def join(self, group: str) -> None:
        """Joins a process group, see `vllm_messages.pack_group`."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver.source.join(decode(bytes.fromhex(group), WeightGroup), rank)

    def start_weight_update(self) -> None:
        if self._updating:
            self._forget_unfinished()
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._loaded = set()
        self._updating = True
        self._receiver.start()
        initialize_layerwise_reload(self.model)

    def receive(self, bucket: str) -> None:
        """Takes a step of the update, see `vllm_messages.pack_bucket`."""
        if bucket == ABANDON:
            raise WeightTransferError("the update was abandoned")
        if bucket == COMPLETE:
            self._check_complete()
        else:
            self._receiver.receive(decode(bytes.fromhex(bucket), Bucket))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _refresh_tied_layers(self.model)
        _pack_experts(self.model)
        self._updating = False

    def leave(self) -> None:
        """Leaves the process group, if it is in one."""
        self._receiver.source.leave()

    def _forget_unfinished(self) -> None:
        """An update broke off: layers that it had begun must not count what it brought as part of the next one."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _check_complete(self) -> None:
        self._receiver.finish()
        missing = sorted(self._parameters - self._loaded)
        if missing:
            raise WeightTransferError(f"{len(missing)} parameters got no weights: {', '.join(missing[:5])}")

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        try:
            loaded = self.model.load_weights(iter(tensors))  # type: ignore[operator]
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            names = ", ".join(name for name, _ in tensors[:5])
            raise WeightTransferError(
                f"the model can't load the tensors {names}: {type(error).__name__}: {error}"
            ) from error
        self._loaded |= loaded or {name for name, _ in tensors}


class AgentRLWeightTransfer(WeightTransferEngine[GroupInfo, BucketInfo]):
    """`ModelUpdate` as vLLM 0.32 and newer ask for it."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._update = ModelUpdate(model, vllm_config, device)

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self._update.join(init_info.group)

    def start_weight_update(self) -> None:
        self._update.start_weight_update()

    def receive_weights(self, update_info: BucketInfo) -> None:
        self._update.receive(update_info.bucket)

    def finish_weight_update(self) -> None:
        self._update.finish_weight_update()

    def shutdown(self) -> None:
        self._update.leave()


def _refresh_tied_layers(model: torch.nn.Module) -> None:
    """An output layer that shares its weights with the embedding gets none of its own, but on a CPU it holds them in
    packed form, made when the model was loaded."""
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if owners.setdefault(id(weight), layer) is not layer and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def _pack_experts(model: torch.nn.Module) -> None:
    """On a CPU the weights of fused experts are in packed form, but vLLM packs them only when it makes their kernel."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and layer.w13_weight.device.type == "cpu":  # type: ignore[union-attr]
            experts.process_weights_after_loading(layer)
