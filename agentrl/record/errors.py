"""Typed failures. What an error is decides what becomes of the episode: see `Fate`."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = [
    "AgentRLError",
    "ContextOverflow",
    "EngineDied",
    "EngineError",
    "EnvError",
    "EpisodeClosed",
    "GuideError",
    "NoProgress",
    "PeerLost",
    "RemoteError",
    "RolloutEnded",
    "WeightTransferError",
]


def leaves(error: BaseException | None) -> Iterator[BaseException]:
    """The errors that really happened: those inside (groups of) groups, else the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from leaves(member)
    elif error is not None:
        yield error


class AgentRLError(Exception):
    """Base of the errors that agentrl raises on purpose."""


class EnvError(AgentRLError):
    """The environment's machinery failed (sandbox died, verifier crashed, search back end down).

    Raise it from an `Env` or a tool when nobody judged the answer: the episode ends with the fate `env_error`
    and takes no part in the statistics. A wrong answer is not an error but a reward.
    """


class EngineError(AgentRLError):
    """An engine could not answer: it died, or refused the request."""


class EngineDied(EngineError):
    """An engine failed for good, whatever it was asked: its process is about to end."""


class GuideError(AgentRLError):
    """No answer can be guided by this JSON schema: it is none, or uses what the engine does not support."""


class ContextOverflow(AgentRLError):
    """The next prompt is longer than `data.max_prompt_length` or than the engine's context."""


class EpisodeClosed(AgentRLError):
    """A policy was used after its episode had ended (timed out, cancelled, or returned)."""


class WeightTransferError(AgentRLError):
    """Weights did not arrive as sent: wrong checksum, missing or unexpected tensors."""


class NoProgress(AgentRLError):
    """Episodes keep ending without anything to train; says how they ended."""


class PeerLost(AgentRLError):
    """The process on the other end of a connection is gone or silent."""


class RemoteError(AgentRLError):
    """A component in another process failed in a way it has no type for; carries that process's traceback."""


class RolloutEnded(AgentRLError):
    """No further batch will come: the tasks are used up or the run was asked to stop."""
