"""New weights inside a worker of vLLM: out of agentrl's buckets, into the running model, in place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.record import WeightTransferError
from agentrl.record.codec import decode, encode
from agentrl.record.protocols import Bucket, WeightGroup
from agentrl.weights.receiver import LoadingReceiver
from agentrl.weights.sources import BucketSource


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """A `record.protocols.WeightGroup`, as hexadecimal MessagePack: it also travels as JSON."""

    group: str


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A `record.protocols.Bucket`, as hexadecimal MessagePack."""

    bucket: str


def pack_group(group: WeightGroup) -> dict[str, Any]:
    """What `init_weight_transfer_engine` takes."""
    return {"group": encode(group).hex()}


def pack_bucket(bucket: Bucket) -> dict[str, Any]:
    """What `update_weights` takes."""
    return {"bucket": encode(bucket).hex()}


class AgentRLWeightTransfer(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives what `agentrl.weights` sends, by shared memory, files or a process group.

    Tensors come under the names of the checkpoint and go through the model's own loader, which knows fused and sharded
    layers; vLLM's layerwise reload puts them where the running kernels expect them.
    """

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = LoadingReceiver(
            self._load, BucketSource(device), _checkpoint_names(self.model_config), device=device
        )
        self._loaded: set[str] = set()
        self._parameters: set[str] = set()
        self._updating = False

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        group = decode(bytes.fromhex(init_info.group), WeightGroup)
        parallel = self.parallel_config
        self._receiver.source.join(group, parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def start_weight_update(self) -> None:
        if self._updating:
            # An update broke off. Layers that it had begun must not count what it brought as part of this one.
            finalize_layerwise_reload(self.model, self.model_config)
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._loaded = set()
        self._updating = True
        self._receiver.start()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        self._receiver.receive(decode(bytes.fromhex(update_info.bucket), Bucket))

    def finish_weight_update(self) -> None:
        self._receiver.finish()
        missing = sorted(self._parameters - self._loaded)
        if missing:
            raise WeightTransferError(f"{len(missing)} parameters got no weights: {', '.join(missing[:5])}")
        finalize_layerwise_reload(self.model, self.model_config)
        self._updating = False

    def shutdown(self) -> None:
        self._receiver.source.leave()

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        try:
            loaded = self.model.load_weights(iter(tensors))  # type: ignore[operator]
        except (KeyError, ValueError, AssertionError) as error:
            names = ", ".join(name for name, _ in tensors[:5])
            raise WeightTransferError(
                f"the model can't load the tensors {names}: {type(error).__name__}: {error}"
            ) from error
        self._loaded |= loaded or {name for name, _ in tensors}


def _checkpoint_names(model_config: Any) -> frozenset[str]:
    """Tensors that an update has to bring: those of the checkpoint, where it is a folder of safetensors."""
    folder = Path(model_config.model)
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        names |= header.keys() - {"__metadata__"}
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        names.discard("lm_head.weight")
    return frozenset(name for name in names if not name.endswith("rotary_emb.inv_freq"))
