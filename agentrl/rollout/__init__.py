"""From tasks to batches: dispatcher, staleness gate, groups, buffer, publications."""

from agentrl.rollout.buffer import Buffer
from agentrl.rollout.episode import EpisodeRunner, Outcome, Plugins
from agentrl.rollout.gate import StalenessGate
from agentrl.rollout.tasks import DataError, load_tasks
from agentrl.rollout.worker import RolloutWorker

__all__ = [
    "Buffer",
    "DataError",
    "EpisodeRunner",
    "Outcome",
    "Plugins",
    "RolloutWorker",
    "StalenessGate",
    "load_tasks",
]
