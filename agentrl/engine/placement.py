"""Which devices an engine has."""

from __future__ import annotations

from agentrl.device import Device


def engine_places(device: Device, count: int, index: int) -> list[int]:
    """Indexes of the devices of one engine. The trainer has the first device, engines the next ones; they share where
    there are fewer.

    Args:
        count: devices of each engine.
        index: which engine it is.
    """
    return [(1 + index * count + number) % device.count() for number in range(count)]
