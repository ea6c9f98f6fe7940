"""From a config to the engine of one process, whichever back end it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from agentrl.config import RunConfig
from agentrl.device import get_device
from agentrl.engine.placement import engine_places
from agentrl.record.protocols import Engine


class RunningEngine(Engine, Protocol):
    """An engine whose process is this one."""

    async def watch(self) -> None:
        """Waits for the end of the engine.

        Raises:
            EngineError: it failed, or was closed.
        """
        ...

    async def close(self) -> None:
        """Stops it and whatever it started."""
        ...


async def load_engine(config: RunConfig, model_path: str, index: int, scratch: Path) -> RunningEngine:
    """The engine with that index among those of a run, ready to answer.

    Args:
        scratch: a folder for files while it runs, which its owner removes.

    Raises:
        Exception: it can't be started; another try would end the same way.
    """
    rollout = config.rollout
    if rollout.engine == "torch":
        from agentrl.engine.torch_engine import load_torch_engine

        device = get_device(config.trainer.device)
        (place,) = engine_places(device, 1, index)
        return await asyncio.to_thread(
            load_torch_engine,
            model_path,
            dtype=config.model.dtype,
            device=device.torch_device(place),
            max_batch_size=rollout.max_batch_size,
            max_model_len=rollout.max_model_len,
            kv_cache_tokens=rollout.kv_cache_tokens,
            kv_on_update=rollout.kv_on_update,
        )
    if rollout.engine == "vllm":
        if rollout.engine_urls:
            from agentrl.engine.vllm_server import connect_vllm_server

            return await connect_vllm_server(config, rollout.engine_urls[index])
        from agentrl.engine.vllm_local import start_vllm_engine

        return await start_vllm_engine(config, model_path, index, scratch)
    from agentrl.engine.sglang_engine import start_sglang_engine

    return await start_sglang_engine(config, model_path, index)
