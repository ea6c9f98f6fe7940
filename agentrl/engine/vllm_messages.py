"""What an engine says to agentrl's weight transfer in vLLM's workers; all of it also travels as JSON."""

from __future__ import annotations

from typing import Any

from agentrl.record.codec import encode
from agentrl.record.protocols import Bucket, WeightGroup

COMPLETE, ABANDON = "complete", "abandon"


def pack_group(group: WeightGroup) -> dict[str, Any]:
    """What `init_weight_transfer_engine` takes."""
    return {"group": encode(group).hex()}


def pack_bucket(bucket: Bucket) -> dict[str, Any]:
    """What `update_weights` takes."""
    return {"bucket": encode(bucket).hex()}


def all_sent() -> dict[str, Any]:
    """Says to `update_weights` that there was the last bucket: it fails if anything is missing. A worker ends an update
    that fails in this call; one that failed in `finish_weight_update` would stay open for ever."""
    return {"bucket": COMPLETE}


def abandon() -> dict[str, Any]:
    """Has `update_weights` fail, and so end an update that its sender left."""
    return {"bucket": ABANDON}
