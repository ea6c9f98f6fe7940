"""LoRA adapters on vLLM's AsyncLLM: an update replaces the adapter, the model below it stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agentrl.config.names import ADAPTER_RANKS
from agentrl.config.schema import ModelConfig
from agentrl.engine.vllm_engine import VllmCounters
from agentrl.engine.vllm_local import LocalVllm
from agentrl.engine.vllm_messages import ABANDON, COMPLETE
from agentrl.record import WeightTransferError
from agentrl.record.codec import decode
from agentrl.record.protocols import Bucket, WeightGroup
from agentrl.weights.bucket import tensor_checksums
from agentrl.weights.receiver import LoadingReceiver
from agentrl.weights.sources import BucketSource


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """What vLLM has to be started with."""
    rank = min(rank for rank in ADAPTER_RANKS if rank >= model.lora_rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


class AdapterVllm(LocalVllm):
    """Every request goes through the one adapter, from the start: until there is an update, it adds nothing.

    Adapters are received here, in the process of the AsyncLLM, and handed to the workers as a file: that way vLLM
    itself knows fused and sharded layers.

    Args:
        shapes: of the adapter's tensors.
        folder: for the file; somebody else removes it.
        device: that adapters come to, if over a process group.
    """

    def __init__(
        self,
        llm: Any,
        counters: VllmCounters,
        model: ModelConfig,
        shapes: dict[str, tuple[int, ...]],
        folder: Path,
        device: torch.device,
    ) -> None:
        super().__init__(llm, counters)
        self._model = model
        self._folder = folder
        self._tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._receiver = LoadingReceiver(self._tensors.update, BucketSource(device), shapes, device=device)
        # One thread, so that buckets are read in the order of their calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    async def start(self) -> None:
        """Puts the first adapter in its place."""
        await self._load()

    def _lora_request(self, *, anew: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("agentrl", 1, str(self._folder), load_inplace=anew)

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        await self._in_thread(self._receiver.source.join, decode(bytes.fromhex(info["group"]), WeightGroup))

    async def start_weight_update(self) -> None:
        self._receiver.start()

    async def update_weights(self, info: dict[str, Any]) -> None:
        word = info["bucket"]
        if word == ABANDON:
            raise WeightTransferError("the update was abandoned")
        if word == COMPLETE:
            self._receiver.finish()
        else:
            await self._in_thread(self._receiver.receive, decode(bytes.fromhex(word), Bucket))

    async def finish_weight_update(self, version: str) -> None:
        await self._load()
        await self.set_version(version)

    async def weight_checksums(self) -> list[dict[str, str]]:
        return [tensor_checksums(self._tensors.items())]

    async def sleep(self, level: int) -> None:
        await super().sleep(1)  # an update would not bring back what 2 drops: the model's own weights

    async def _in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._receiver.source.leave()
        await super().close()

    async def _load(self) -> None:
        """Has vLLM read the adapter anew, for requests that run too."""
        layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in self._tensors}
        config = {"peft_type": "LORA", "r": self._model.lora_rank, "lora_alpha": self._model.lora_alpha}
        config["target_modules"] = sorted(layers)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "adapter_config.json").write_text(json.dumps(config))
        own = {name: tensor.cpu().contiguous() for name, tensor in self._tensors.items()}
        await asyncio.to_thread(save_file, own, self._folder / "adapter_model.safetensors")
        await self._ask(self._llm.add_lora(self._lora_request(anew=True)))
