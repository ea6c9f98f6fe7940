"""One answer's guide, looked at from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from agentrl.engine.guide import Guide, Guides


def guide_of(guides: Guides, request: Any) -> Guide:
    """A guide before the first token of a request's answer."""
    guide = asyncio.run(guides.guide(request))
    assert guide is not None
    return guide


def allowed(guide: Guide) -> list[int]:
    """The tokens that may come next."""
    return np.flatnonzero(np.unpackbits(guide.allowed, bitorder="little")).tolist()
