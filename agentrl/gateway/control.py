"""What agents tell the run over HTTP beside asking the model: rewards, and episodes of their own accord."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec

from agentrl.gateway.dialect import decode
from agentrl.gateway.errors import GatewayError
from agentrl.record import AgentRLError
from agentrl.session import Verdict
from agentrl.session.session import LARGEST_REWARD


class RewardRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /agentrl/reward`: of the whole episode, or of the turn (or turns) of one answer."""

    reward: float
    response_id: str | None = None
    parts: dict[str, float] = {}
    info: dict[str, Any] = {}


class EndRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /agentrl/episodes/end`: the episode is over and has no reward."""

    error: Annotated[str, msgspec.Meta(min_length=1)]
    fate: Literal["agent_error", "env_error"] = "agent_error"


_DECODE_REWARD = msgspec.json.Decoder(RewardRequest)
_DECODE_END = msgspec.json.Decoder(EndRequest)


class NoCapacity(AgentRLError):
    """No episode may be started now.

    Attributes:
        retry_after: seconds after which it is worth asking again; 0: never, since no task is left.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """An episode for an agent that runs elsewhere.

    Attributes:
        task: what it is to do; JSON values.
    """

    episode_id: str
    api_key: str
    task: dict[str, Any] = field(default_factory=dict)


class Desk(Protocol):
    """Where agents from outside ask for episodes."""

    async def open(self, wanted: Callable[[], bool]) -> OpenedEpisode:
        """The next episode that the staleness gate admits.

        Args:
            wanted: whether whoever asks is still there when there is one.

        Raises:
            NoCapacity: there is none now.
        """
        ...


def read_reward(body: bytes) -> RewardRequest:
    """Raises GatewayError for anything but a finite reward."""
    request = decode(_DECODE_REWARD, body)
    for name, value in (("reward", request.reward), *request.parts.items()):
        if not abs(value) <= LARGEST_REWARD:
            said = f"{name} must be finite, and at most {LARGEST_REWARD:g}, but is {value}"
            raise GatewayError(400, said, param="reward")
    if request.response_id is not None and (request.parts or request.info):
        raise GatewayError(400, "parts and info belong to the reward of an episode, not of a turn", param="parts")
    return request


def read_end(body: bytes) -> Verdict:
    """Why an episode has no reward. Raises GatewayError for a malformed body."""
    request = decode(_DECODE_END, body)
    return Verdict(error=request.error, blameless=request.fate == "env_error")
