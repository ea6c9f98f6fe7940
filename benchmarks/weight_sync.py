"""How fast are weights from one process in another? Prints one JSON object a size and transport.

    python benchmarks/weight_sync.py                              # 0.5 and 2 GB, shm, disk and gloo
    python benchmarks/weight_sync.py --gigabytes 0.5 --rounds 3
    python benchmarks/weight_sync.py --vllm                       # SmolLM2 into a running vLLM, its load time apart

In every round each transport and a plain copy of the same bytes (`copy_`, one thread, one process) take turns, so that
what else the machine does hits all of them; the ratio is that of the round. So does what no transfer between two
processes can beat: both receivers at once copy as many bytes and compute their checksum, without waiting for anybody.
`shm` and `disk` have one receiver, `collective` two, which join the trainer's process group over gloo. Receivers are
processes of their own, called like engines are, and copy into their own parameters; checksums are computed on both
sides, as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from reporting import report, spread

from agentrl.cluster.rpc import RpcClient, RpcServer, connected
from agentrl.record.protocols import Bucket, WeightGroup, WeightReceivers
from agentrl.weights.bucket import BucketLayout, fill, pack
from agentrl.weights.collective import CollectiveSender
from agentrl.weights.disk import DiskSender
from agentrl.weights.receiver import ParameterReceiver
from agentrl.weights.segment import shared_memory_root
from agentrl.weights.sender import WeightSender
from agentrl.weights.shm import ShmSender

LAYER = {"qkv": (3, 1024, 1024), "out": (1024, 1024), "up": (2, 4096, 1024), "down": (1024, 4096), "norm": (1024,)}


def model_of(gigabytes: float) -> dict[str, torch.Tensor]:
    """Tensors like those of a transformer, in bfloat16, of so many gigabytes altogether."""
    nbytes = 2 * sum(torch.Size(shape).numel() for shape in LAYER.values())
    layers = max(1, round(gigabytes * 1e9 / nbytes))
    return {
        f"layers.{index}.{name}": torch.full(shape, index / 7, dtype=torch.bfloat16)
        for index in range(layers)
        for name, shape in LAYER.items()
    }


class Receiving(Protocol):
    """An engine, as far as weights are concerned."""

    async def join(self, group: WeightGroup) -> None: ...

    async def start(self) -> None: ...

    async def receive(self, bucket: Bucket) -> None: ...

    async def finish(self) -> float: ...

    async def copy(self) -> float: ...


class Receiver:
    """Copies what comes into parameters of its own."""

    def __init__(self, gigabytes: float) -> None:
        self._parameters = model_of(gigabytes)
        self._receiver = ParameterReceiver(self._parameters)
        self._thread = ThreadPoolExecutor(1)  # buckets are read in the order of their calls, as engines do

    async def join(self, group: WeightGroup) -> None:
        await asyncio.to_thread(self._receiver.source.join, group)

    async def start(self) -> None:
        self._receiver.start()

    async def receive(self, bucket: Bucket) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._receiver.receive, bucket)

    async def finish(self) -> float:
        """Ends the update; returns a value of the last tensor, to compare."""
        self._receiver.finish()
        return float(next(reversed(self._parameters.values())).flatten()[-1])

    async def copy(self) -> float:
        """Seconds to copy its parameters into buckets, checksums included."""
        layout = BucketLayout(2**26)
        target = torch.empty(layout.nbytes, dtype=torch.uint8)
        began = time.perf_counter()
        for pieces in pack(self._parameters.items(), layout):
            fill(target, pieces)
            await asyncio.sleep(0)
        return time.perf_counter() - began


def receive(address: str, gigabytes: float) -> None:
    """The main function of a receiver."""
    torch.set_num_threads(1)

    async def serve() -> None:
        await RpcServer(address, Receiver(gigabytes), Receiving).serve()

    asyncio.run(serve())


@contextmanager
def receivers(folder: Path, count: int, gigabytes: float) -> Iterator[list[str]]:
    """So many receivers, each at its address."""
    addresses = [f"ipc://{folder}/receiver-{number}" for number in range(count)]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--receive", address, "--gigabytes", str(gigabytes)])
        for address in addresses
    ]
    try:
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.wait()


@asynccontextmanager
async def clients_of(addresses: Sequence[str]) -> AsyncIterator[list[Receiving]]:
    clients = [RpcClient(address, Receiving, name=address) for address in addresses]
    async with connected(*clients):
        yield [client.proxy for client in clients]


async def update(sender: WeightSender, tensors: dict[str, torch.Tensor], engines: list[Receiving]) -> float:
    """Seconds of one whole transfer."""

    async def each(call: Callable[[Receiving], Any]) -> None:
        await asyncio.gather(*(call(engine) for engine in engines))

    async def join(group: WeightGroup) -> None:
        await asyncio.gather(
            *(
                engine.join(WeightGroup(group.name, group.address, group.backend, group.world_size, rank, 60.0))
                for rank, engine in enumerate(engines, 1)
            )
        )

    names = tuple(str(number) for number in range(len(engines)))
    await sender.connect(WeightReceivers(names, (1,) * len(engines)), join)
    await each(lambda engine: engine.start())
    began = time.perf_counter()
    await sender.send(tensors.items(), lambda bucket: each(lambda engine: engine.receive(bucket)))
    seconds = time.perf_counter() - began
    expected = float(next(reversed(tensors.values())).flatten()[-1])
    for engine in engines:
        assert await engine.finish() == expected
    return seconds


def copy(tensors: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    """Seconds of a plain copy."""
    began = time.perf_counter()
    for name, tensor in tensors.items():
        target[name].copy_(tensor)
    return time.perf_counter() - began


async def measure(gigabytes: float, rounds: int, bucket_mb: int, folder: Path) -> None:
    tensors, target = model_of(gigabytes), model_of(gigabytes)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    senders: dict[str, tuple[WeightSender, int]] = {
        "shm": (ShmSender(folder, bucket_mb * 2**20), 1),
        "disk": (DiskSender(folder / "disk", bucket_mb * 2**20), 1),
        "collective": (
            CollectiveSender(
                BucketLayout(bucket_mb * 2**20),
                backend="gloo",
                device=torch.device("cpu"),
                host="127.0.0.1",
                timeout=60,
            ),
            2,
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "limit", *senders)}
    with receivers(folder, 2, gigabytes) as addresses:
        async with clients_of(addresses) as engines:
            for number in range(rounds + 1):  # the first one touches the memory
                for tensor in tensors.values():
                    tensor.add_(1)
                times = {"copy": copy(tensors, target)}
                times["limit"] = max(await asyncio.gather(*(engine.copy() for engine in engines)))
                for name, (sender, count) in senders.items():
                    times[name] = await update(sender, tensors, engines[:count])
                for name, value in times.items() if number else ():
                    seconds[name].append(value)
    for name, (sender, count) in senders.items():
        sender.close()
        shares = {
            f"share_of_{other}": spread([theirs / own for theirs, own in zip(seconds[key], seconds[name], strict=True)])
            for key, other in (("copy", "plain_copy"), ("limit", "two_copies_at_once"))
        }
        report(
            {
                "transport": name,
                "receivers": count,
                "gigabytes": round(nbytes / 1e9, 3),
                "bucket_mb": bucket_mb,
                "seconds": spread(seconds[name]),
                "gigabytes_per_second": round(nbytes / 1e9 / statistics.median(seconds[name]), 2),
                "plain_copy_gigabytes_per_second": round(nbytes / 1e9 / statistics.median(seconds["copy"]), 2),
                **shares,
            }
        )


async def measure_vllm(rounds: int, bucket_mb: int, folder: Path) -> None:
    """Whole updates of a running vLLM, and how much of them is its workers' own loading."""
    from transformers import AutoModelForCausalLM

    from agentrl.config import load_config
    from agentrl.engine.vllm_local import start_vllm_engine
    from agentrl.models import resolve_model

    path = resolve_model("smollm2")
    config = load_config(
        {
            "model": {"path": "smollm2"},
            "data": {"train": "agentrl.envs.math:arithmetic_tasks"},
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "rollout": {"engine": "vllm", "max_batch_size": 8, "kv_cache_tokens": 16384},
            "trainer": {"total_steps": 1, "device": "cpu"},
        }
    )
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    target = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}
    engine = await start_vllm_engine(config, path, 0, folder)
    sender = ShmSender(folder, bucket_mb * 2**20)
    receiver = ParameterReceiver(target)

    thread = ThreadPoolExecutor(1)

    async def receive_here(bucket: Bucket) -> None:
        await asyncio.get_running_loop().run_in_executor(thread, receiver.receive, bucket)

    rows: list[dict[str, float]] = []
    for version in range(1, rounds + 2):
        receiver.start()
        began = time.perf_counter()
        nbytes = await sender.send(parameters.items(), receive_here)
        transport = time.perf_counter() - began
        receiver.finish()
        began = time.perf_counter()
        await engine.pause()
        await engine.start_weight_update()
        await sender.send(parameters.items(), engine.update_weights)
        await engine.finish_weight_update(version)
        await engine.resume()
        rows.append({"transport": transport, "update": time.perf_counter() - began})
    await engine.close()
    rows = rows[1:]
    report(
        {
            "engine": "vllm",
            "gigabytes": round(nbytes / 1e9, 3),
            "update_seconds": spread([row["update"] for row in rows]),
            "transport_alone_seconds": spread([row["transport"] for row in rows]),
            "load_seconds": spread([row["update"] - row["transport"] for row in rows]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--receive", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.receive, arguments.gigabytes[0])
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=shared_memory_root(2**26)) as folder:
        if arguments.vllm:
            asyncio.run(measure_vllm(arguments.rounds, arguments.bucket_mb, Path(folder)))
            return
        for gigabytes in arguments.gigabytes:
            asyncio.run(measure(gigabytes, arguments.rounds, arguments.bucket_mb, Path(folder)))


if __name__ == "__main__":
    main()
