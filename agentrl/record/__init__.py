"""The data that flows between the rooms, and the protocols they talk through."""

from agentrl.record.dump import TrajectoryWriter, load
from agentrl.record.errors import (
    AgentRLError,
    ContextOverflow,
    EngineDied,
    EngineError,
    EnvError,
    EpisodeClosed,
    GuideError,
    NoProgress,
    PeerLost,
    RemoteError,
    RolloutEnded,
    WeightTransferError,
)
from agentrl.record.graph import MessageGraph, Node
from agentrl.record.messages import Message, MessageError, ToolSpec
from agentrl.record.reply import Completion, Reply, ToolCall
from agentrl.record.task import Fate, FateRecord, Task
from agentrl.record.trajectory import Batch, Branch, Group, Trajectory, Turn

__all__ = [
    "AgentRLError",
    "Batch",
    "Branch",
    "Completion",
    "ContextOverflow",
    "EngineDied",
    "EngineError",
    "EnvError",
    "EpisodeClosed",
    "Fate",
    "FateRecord",
    "Group",
    "GuideError",
    "Message",
    "MessageError",
    "MessageGraph",
    "NoProgress",
    "Node",
    "PeerLost",
    "RemoteError",
    "Reply",
    "RolloutEnded",
    "Task",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "TrajectoryWriter",
    "Turn",
    "WeightTransferError",
    "load",
]
