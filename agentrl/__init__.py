"""Train LLM agents with asynchronous reinforcement learning.

Subclass `AgentLoop`, name it in a YAML file, and run `agentrl train`; or call `agentrl.train`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.api import RunResult, train
    from agentrl.record import EnvError, Task, Trajectory
    from agentrl.sdk import (
        AgentLoop,
        Completion,
        Env,
        FunctionEnv,
        OutsideAgent,
        Policy,
        Reply,
        Reward,
        Sampler,
        SyncPolicy,
        ToolAgentLoop,
        ToolCall,
        ToolError,
        Transcript,
        tool,
    )

_HOMES = {
    "agentrl.api": ("RunResult", "train"),
    "agentrl.record": ("EnvError", "Task", "Trajectory"),
    "agentrl.sdk": (
        "AgentLoop",
        "Completion",
        "Env",
        "FunctionEnv",
        "OutsideAgent",
        "Policy",
        "Reply",
        "Reward",
        "Sampler",
        "SyncPolicy",
        "ToolAgentLoop",
        "ToolCall",
        "ToolError",
        "Transcript",
        "tool",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AgentLoop",
    "Completion",
    "Env",
    "EnvError",
    "FunctionEnv",
    "OutsideAgent",
    "Policy",
    "Reply",
    "Reward",
    "RunResult",
    "Sampler",
    "SyncPolicy",
    "Task",
    "ToolAgentLoop",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "Transcript",
    "tool",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported at first use, so that `agentrl --help` and a config error answer at once.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
