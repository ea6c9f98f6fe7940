"""Async tests as plain functions, each in an event loop of its own, none longer than it should take."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test; one that hangs fails after 20 seconds."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(_limited(test(*args, **kwargs)))

    return run


async def _limited(work: Awaitable[None]) -> None:
    async with asyncio.timeout(20):
        await work


async def until(condition: Callable[[], bool]) -> None:
    """Lets everything else run until `condition()` holds."""
    while not condition():  # noqa: ASYNC110  a condition of any kind has no event to wait for
        await asyncio.sleep(0)


async def settle(rounds: int = 100) -> None:
    """Lets everything run that can run without anything new from outside."""
    for _ in range(rounds):
        await asyncio.sleep(0)
