"""The conversation layer between agents and engines."""

from agentrl.session.blocking import BlockingPolicy
from agentrl.session.chat_format import ChatFormat, ParsedTurn
from agentrl.session.session import Generator, SamplingLimits, Session

__all__ = ["BlockingPolicy", "ChatFormat", "Generator", "ParsedTurn", "SamplingLimits", "Session"]
