"""The conversation layer between agents and engines."""

from agentrl.session.chat_format import ChatFormat, ParsedTurn
from agentrl.session.session import Generator, SamplingLimits, Session

__all__ = ["ChatFormat", "Generator", "ParsedTurn", "SamplingLimits", "Session"]
