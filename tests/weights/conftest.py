"""The two ends of a transfer, connected without a process between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.weights.receiver import ParameterReceiver
from agentrl.weights.shm import ShmSender

torch.set_num_threads(1)


@pytest.fixture
def transfer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """`transfer(sent, received, bucket_bytes)`: sends tensors into parameters of the same names."""

    def run(sent: Mapping[str, torch.Tensor], received: dict[str, torch.Tensor], bucket_bytes: int = 1000) -> int:
        receiver = ParameterReceiver(received)

        async def deliver(bucket: Any) -> None:
            receiver.receive(bucket)

        async def play() -> int:
            folder: Path = tmp_path_factory.mktemp("segments")
            receiver.start()
            nbytes = await ShmSender(folder, bucket_bytes).send(sent.items(), deliver)
            receiver.finish()
            return nbytes

        return asyncio.run(play())

    return run
