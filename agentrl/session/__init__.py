"""The conversation layer between agents and engines."""

from agentrl.session.blocking import BlockingPolicy
from agentrl.session.calls import ChatAnswer, ChatCall, Door, Verdict
from agentrl.session.chat_format import ChatFormat
from agentrl.session.session import Generator, SamplingLimits, Session
from agentrl.session.turns import ParsedTurn, SampledTurn

__all__ = [
    "BlockingPolicy",
    "ChatAnswer",
    "ChatCall",
    "ChatFormat",
    "Door",
    "Generator",
    "ParsedTurn",
    "SampledTurn",
    "SamplingLimits",
    "Session",
    "Verdict",
]
