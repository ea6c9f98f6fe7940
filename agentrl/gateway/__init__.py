"""The HTTP door for agents of other frameworks: OpenAI Chat Completions, OpenAI Responses, Anthropic Messages."""

from agentrl.gateway.control import Desk, NoCapacity, OpenedEpisode
from agentrl.gateway.server import Gateway, GatewayAddress

__all__ = ["Desk", "Gateway", "GatewayAddress", "NoCapacity", "OpenedEpisode"]
