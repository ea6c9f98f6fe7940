"""The policy in the hands of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.record import Completion, Reply, ToolSpec


class Policy(Protocol):
    """The model under training, as `AgentLoop.run` sees it.

    Each call is recorded with the exact tokens, log-probs and policy versions. How tokens are sampled during
    training (temperature) is the config's business; an agent can only end a turn earlier, by `max_tokens` and `stop`.

    Attributes:
        base_url, api_key, model: for agents of any other framework: what its OpenAI or Anthropic client is to be given.
            Its calls are recorded like those of `chat`; the key is good for this episode alone.
    """

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def model(self) -> str: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        """The model's next turn.

        Args:
            tools: what the model may call; described to it in the way of its own chat template.
            max_tokens: most tokens to sample.
            stop: the turn also ends where it says one of these texts, besides those of `rollout.stop`. They are part
                of what is recorded and trained, not of the reply.

        Raises:
            MessageError: the messages can't be rendered.
            ContextOverflow: the prompt is longer than `data.max_prompt_length` or the engine's context.
            EngineError: no engine could answer.
            EpisodeClosed: the episode has already ended.
        """
        ...

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Completion:
        """Continues raw token ids, for agents that do their own tokenisation. Arguments and errors as in `chat`."""
        ...

    def reward(self, value: float, turn: int | None = None) -> None:
        """Credits a turn (`reply.turn`; default: the latest) with a reward of its own.

        Raises:
            ValueError: no such turn, or a value that is not finite.
        """
        ...


class SyncPolicy(Protocol):
    """The same for a plain (not async) `run`, which is executed in a thread: calls block."""

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def model(self) -> str: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply: ...

    def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Completion: ...

    def reward(self, value: float, turn: int | None = None) -> None: ...
