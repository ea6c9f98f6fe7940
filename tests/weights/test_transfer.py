"""Segments are reused only when read, damage is noticed, and a failed transfer leaves nothing running."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentrl.record import WeightTransferError
from agentrl.record.protocols import Bucket
from agentrl.weights.receiver import ParameterReceiver
from agentrl.weights.segment import Segment, shared_memory_root
from agentrl.weights.shm import ShmSender

TENSORS = [(f"t{i}", torch.full((25,), float(i))) for i in range(10)]  # 100 bytes each, one a bucket


def receiver_of(tensors: list[tuple[str, torch.Tensor]]) -> ParameterReceiver:
    receiver = ParameterReceiver({name: torch.zeros_like(tensor) for name, tensor in tensors})
    receiver.start()
    return receiver


def test_a_segment_is_filled_again_only_after_its_delivery(tmp_path: Path) -> None:
    async def play() -> None:
        sender = ShmSender(tmp_path, 128, segments=2)
        arrivals: asyncio.Queue[tuple[Bucket, asyncio.Event]] = asyncio.Queue()
        content: list[float] = []

        async def deliver(bucket: Bucket) -> None:
            read = asyncio.Event()
            arrivals.put_nowait((bucket, read))
            await read.wait()
            content.append(float(Segment.attach(bucket.segment).tensor[:4].view(torch.float32)[0]))

        sending = asyncio.create_task(sender.send(TENSORS, deliver))
        first, second = await arrivals.get(), await arrivals.get()
        assert first[0].segment != second[0].segment
        second[1].set()  # out of order: the sender still waits for the first segment
        await asyncio.sleep(0)
        assert arrivals.empty() and not sending.done()
        first[1].set()
        for _ in range(8):
            (await arrivals.get())[1].set()
        assert await sending == 10 * 100
        assert sorted(content) == [float(i) for i in range(10)]

    asyncio.run(play())


def test_no_more_memory_than_the_segments_is_used(tmp_path: Path) -> None:
    async def play() -> None:
        async def deliver(bucket: Bucket) -> None: ...

        await ShmSender(tmp_path, 128, segments=3).send(TENSORS, deliver)

    asyncio.run(play())
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [128] * 3


@pytest.mark.parametrize("position", [0, 40, 99])
def test_a_flipped_byte_is_noticed(tmp_path: Path, position: int) -> None:
    async def play() -> None:
        receiver = receiver_of(TENSORS)

        async def deliver(bucket: Bucket) -> None:
            if bucket.index == 4:
                Segment.attach(bucket.segment).tensor[position] ^= 0x10
            receiver.receive(bucket)

        with pytest.raises(WeightTransferError, match="bucket 4: checksum"):
            await ShmSender(tmp_path, 128).send(TENSORS, deliver)

    asyncio.run(play())


def test_a_lost_bucket_and_a_doubled_one_are_noticed(tmp_path: Path) -> None:
    async def play(lost: int, times: int, message: str) -> None:
        receiver = receiver_of(TENSORS)

        async def deliver(bucket: Bucket) -> None:
            for _ in range(times if bucket.index == lost else 1):
                receiver.receive(bucket)

        with pytest.raises(WeightTransferError, match=message):
            await ShmSender(tmp_path, 128).send(TENSORS, deliver)
            receiver.finish()

    asyncio.run(play(7, 0, "bucket 8 came where bucket 7 was due"))
    asyncio.run(play(7, 2, "bucket 7 came where bucket 8 was due"))
    asyncio.run(play(9, 0, "t9"))


def test_half_a_tensor_is_not_a_tensor(tmp_path: Path) -> None:
    async def play() -> None:
        receiver = receiver_of(TENSORS[:1])

        async def deliver(bucket: Bucket) -> None:
            if bucket.index == 0:
                receiver.receive(bucket)

        await ShmSender(tmp_path, 64).send(TENSORS[:1], deliver)
        with pytest.raises(WeightTransferError, match="t0"):
            receiver.finish()

    asyncio.run(play())


def test_a_new_start_forgets_an_unfinished_update(tmp_path: Path) -> None:
    async def play() -> None:
        receiver = receiver_of(TENSORS)
        sender = ShmSender(tmp_path, 64)

        async def deliver(bucket: Bucket) -> None:
            receiver.receive(bucket)

        await sender.send(TENSORS[:3], deliver)
        receiver.start()
        await sender.send(TENSORS, deliver)
        receiver.finish()

    asyncio.run(play())


def test_a_failed_delivery_ends_the_transfer_and_leaves_no_task(tmp_path: Path) -> None:
    complaints: list[dict] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        delivered: list[int] = []
        cancelled: list[int] = []
        arrived = asyncio.Event()

        async def deliver(bucket: Bucket) -> None:
            if bucket.index == 2:
                await arrived.wait()
                raise WeightTransferError("the engine is gone")
            if bucket.index == 3:
                arrived.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(bucket.index)
            delivered.append(bucket.index)

        sender = ShmSender(tmp_path, 128)
        with pytest.raises(WeightTransferError, match="the engine is gone"):
            await sender.send(TENSORS, deliver)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert delivered == [0, 1] and cancelled == [3]

        async def accept(bucket: Bucket) -> None:
            delivered.append(bucket.index)

        assert await sender.send(TENSORS, accept) == 1000  # the sender can be used again

    asyncio.run(play())
    assert complaints == []


def test_a_cancelled_transfer_cancels_its_deliveries(tmp_path: Path) -> None:
    async def play() -> None:
        arrived = asyncio.Event()

        async def deliver(bucket: Bucket) -> None:
            if bucket.index:
                arrived.set()
            await asyncio.Event().wait()

        sending = asyncio.create_task(ShmSender(tmp_path, 128).send(TENSORS, deliver))
        await arrived.wait()
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_missing_shared_memory_is_a_transfer_error(tmp_path: Path) -> None:
    async def play() -> None:
        receiver = receiver_of(TENSORS)

        async def deliver(bucket: Bucket) -> None:
            receiver.receive(replace(bucket, segment=str(tmp_path / "elsewhere")))

        with pytest.raises(WeightTransferError, match=r"no shared memory or file at .*elsewhere"):
            await ShmSender(tmp_path, 128).send(TENSORS, deliver)

    asyncio.run(play())


def test_segments_go_with_their_folder_while_they_are_mapped(tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    folder.mkdir()

    async def play() -> None:
        receiver = receiver_of(TENSORS)

        async def deliver(bucket: Bucket) -> None:
            receiver.receive(bucket)

        sender = ShmSender(folder, 128)
        await sender.send(TENSORS, deliver)
        shutil.rmtree(folder)
        assert not folder.exists()
        receiver.start()
        await sender.send(TENSORS, deliver)  # the mappings outlive the names
        receiver.finish()

    asyncio.run(play())


def test_segments_live_on_disk_where_memory_is_short() -> None:
    assert shared_memory_root(1 << 60) != Path("/dev/shm")
    assert shared_memory_root(0).is_dir()
