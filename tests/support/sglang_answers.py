"""What the answers of the protocol server have to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from agentrl.record.protocols import GenerateRequest, GenerateResult
from tests.support.sglang_server import logprob_of, token_at

RequestOf = Callable[..., GenerateRequest]


def check(request: GenerateRequest, result: GenerateResult) -> None:
    """Every token is what follows, and its version is that of the weights that its log-prob tells of."""
    count, start = len(result.token_ids), len(request.token_ids)
    assert result.token_ids.tolist() == [token_at(request.seed, start + i) for i in range(count)]
    expected = [
        logprob_of(version, token)
        for version, token in zip(result.versions.tolist(), result.token_ids.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(result.logprobs, np.array(expected, np.float32))
    assert (result.token_ids.dtype, result.versions.dtype) == (np.int32, np.int32)


async def eventually(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  a condition of any kind has no event to wait for
        await asyncio.sleep(0.005)
