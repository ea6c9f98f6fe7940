"""What vLLM loads in each of its processes, through the entry point group `vllm.general_plugins`."""

from __future__ import annotations

WEIGHT_TRANSFER = "agentrl"
"""Name of agentrl's weight transfer: `--weight-transfer-config '{"backend": "agentrl"}'`."""
WORKER_EXTENSION = "agentrl.engine.vllm_worker.WeightUpdates"
"""What vLLM's workers get in its place before 0.32."""


def register() -> None:
    """Makes agentrl's weight transfer known to vLLM; its own code is imported where an engine uses it."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "agentrl.engine.vllm_weights", "AgentRLWeightTransfer"
        )
