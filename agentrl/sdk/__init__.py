"""What users subclass and call."""

from agentrl.record import Completion, Reply, ToolCall
from agentrl.sdk.env import Env, Transcript
from agentrl.sdk.function_env import FunctionEnv
from agentrl.sdk.loop import AgentLoop, OutsideAgent, ToolAgentLoop
from agentrl.sdk.policy import Policy, SyncPolicy
from agentrl.sdk.reward import Reward, RewardLike, as_reward
from agentrl.sdk.sampler import Sampler
from agentrl.sdk.tool import ToolError, tool

__all__ = [
    "AgentLoop",
    "Completion",
    "Env",
    "FunctionEnv",
    "OutsideAgent",
    "Policy",
    "Reply",
    "Reward",
    "RewardLike",
    "Sampler",
    "SyncPolicy",
    "ToolAgentLoop",
    "ToolCall",
    "ToolError",
    "Transcript",
    "as_reward",
    "tool",
]
