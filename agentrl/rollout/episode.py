"""One episode: an agent plays one task, and what comes out of it has a type."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.config import RunConfig
from agentrl.record import (
    AgentRLError,
    ContextOverflow,
    EngineError,
    EnvError,
    Fate,
    PeerLost,
    Task,
    Trajectory,
)
from agentrl.record.errors import leaves
from agentrl.record.trajectory import Status
from agentrl.sdk import AgentLoop, Env, Reward, as_reward
from agentrl.sdk.plugin import load_class
from agentrl.session import BlockingPolicy, ChatFormat, Generator, SamplingLimits, Session
from agentrl.session.blocking import in_thread

T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_EXPLAINED = 100
"""Different errors of agents and environments whose traceback is logged; fates.jsonl has the reason of each episode."""
_GRAVITY = (Fate.ENGINE_ERROR, Fate.ENV_ERROR, Fate.AGENT_ERROR, Fate.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended.

    Attributes:
        trajectory: what was recorded, if any model call was.
        reward: None unless somebody judged it.
        failure: what kind of failure it was; None if it was judged.
        reason: of the failure, in words.
    """

    trajectory: Trajectory | None
    reward: Reward | None
    failure: Fate | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether it can be trained."""
        return self.failure is None and self.trajectory is not None and self.trajectory.sampled_tokens > 0


@dataclass(frozen=True, slots=True)
class Plugins:
    """The user's classes, found and checked."""

    loop: type[AgentLoop]
    env: type[Env] | None

    @classmethod
    def load(cls, config: RunConfig) -> Plugins:
        """What `agent` and `env` of a config name.

        Raises:
            PluginError: not found, of the wrong kind, or not built with these arguments.
        """
        env: type[Env] | None = None
        kwargs = dict(config.agent.args)
        if config.env.cls is not None:
            env = load_class(config.env.cls, Env, key="env.cls", kwargs=config.env.args)
            kwargs["env"] = None
        loop = load_class(config.agent.loop, AgentLoop, key="agent.loop", kwargs=kwargs)
        return cls(loop, env)


class EpisodeRunner:
    """Plays episodes with the agent and environment of a config.

    A failure never escapes as an exception and never becomes a reward: it comes back typed. Only a cancellation
    from outside passes through.

    Args:
        ended: told the id of every episode that is over.
    """

    def __init__(
        self,
        config: RunConfig,
        plugins: Plugins,
        chat_format: ChatFormat,
        generator: Generator,
        ended: Callable[[str], None] = lambda episode_id: None,
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._format = chat_format
        self._generator = generator
        self._ended = ended
        self._explained: set[str] = set()

    async def play(self, task: Task, *, group_id: str, episode_id: str, version: int) -> Outcome:
        """Plays `task` once; no weights older than `version` answer. The agent gets a copy of its own."""
        task = copy.deepcopy(task)
        session = Session(
            episode_id,
            self._format,
            self._generator,
            self._limits(task),
            seed=self._config.data.seed,
            min_version=version,
        )
        started = time.monotonic()
        reward, failure, reason = await self._judge(task, session)
        seconds = time.monotonic() - started
        if failure is None and not session.graph.turns:
            failure, reason = Fate.AGENT_ERROR, f"{self._config.agent.loop} returned without any model call"
        trajectory = None
        if session.graph.turns:
            cut = any(turn.finish_reason == "length" for turn in session.graph.turns)
            status: Status = "aborted" if failure else "truncated" if cut else "completed"
            trajectory = Trajectory(
                episode_id=episode_id,
                group_id=group_id,
                task_id=task.id,
                dataset_index=task.index,
                epoch=task.epoch,
                branches=session.graph.branches(),
                reward=reward.value if reward else 0.0,
                reward_parts=reward.parts if reward else {},
                status=status,
                version_admitted=version,
                timings={"episode": seconds},
                info=reward.info if reward else {},
            )
        return Outcome(trajectory, reward if failure is None else None, failure, reason, seconds)

    def _limits(self, task: Task) -> SamplingLimits:
        config = self._config
        temperature = config.rollout.temperature if task.split == "train" else config.val.temperature
        return SamplingLimits(
            temperature, config.data.max_prompt_length, config.data.max_response_length, config.rollout.max_model_len
        )

    async def _judge(self, task: Task, session: Session) -> tuple[Reward | None, Fate | None, str]:
        limit = self._config.rollout.episode_timeout
        env: Env | None = None
        playing: asyncio.Task[Any] | None = None
        try:
            env = self._build_env()
            # In a task of its own: an agent may cancel itself, or swallow its cancellation, without holding the runner.
            playing = asyncio.create_task(self._run(task, session, env))
            await asyncio.wait({playing}, timeout=limit)
            if not playing.done():
                return None, Fate.TIMEOUT, f"ran longer than rollout.episode_timeout = {limit:g} s"
            return as_reward(playing.result()), None, ""
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None, Fate.AGENT_ERROR, "the agent cancelled itself"
        except Exception as error:
            failure, cause = _failure(error)
            reason = _describe(cause)
            unexplained = reason not in self._explained and len(self._explained) < _EXPLAINED
            if failure in (Fate.AGENT_ERROR, Fate.ENV_ERROR) and unexplained:
                self._explained.add(reason)
                log.warning("episode %s: %s", session.episode_id, reason, exc_info=error)
            return None, failure, reason
        finally:
            session.close()
            self._ended(session.episode_id)
            if playing is not None:
                await _end(playing, session.episode_id)
            if env is not None:
                await _close(env, session.episode_id)

    async def _run(self, task: Task, session: Session, env: Env | None) -> Any:
        try:
            kwargs = dict(self._config.agent.args)
            if env is not None:
                kwargs["env"] = env
            loop = self._plugins.loop(**kwargs)
            if inspect.iscoroutinefunction(loop.run):
                return await loop.run(task, session)
            policy = BlockingPolicy(session, asyncio.get_running_loop())
            try:
                result = await in_thread(lambda: loop.run(task, policy))
            finally:
                policy.cancel()
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(
                    f"{self._config.agent.loop}: run is a plain function but returns a coroutine: "
                    "declare it `async def`"
                )
            return result
        except SystemExit as error:
            raise RuntimeError(f"the agent called exit({error.code!r})") from error

    def _build_env(self) -> Env | None:
        if self._plugins.env is None:
            return None
        try:
            return self._plugins.env(**self._config.env.args)
        except AgentRLError:
            raise
        except Exception as error:
            raise EnvError(f"{self._config.env.cls} could not be built: {_describe(error)}") from error


async def _end(playing: asyncio.Task[Any], episode_id: str) -> None:
    """Cancels an agent that still runs; one that does not let itself be cancelled is left behind, and said so."""
    if playing.done():
        return
    playing.cancel()
    await asyncio.wait({playing}, timeout=_CLOSE_SECONDS)
    if not playing.done():
        log.error("episode %s: its agent swallows its cancellation and goes on running", episode_id)


async def _close(env: Env, episode_id: str) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await env.close()
    except Exception as error:
        log.warning("episode %s: closing its environment failed: %s", episode_id, _describe(error), exc_info=error)


def _failure(error: BaseException) -> tuple[Fate, BaseException]:
    """What an exception makes of its episode, and the exception that says so: of a group, the gravest."""
    return min(((_fate(leaf), leaf) for leaf in leaves(error)), key=lambda failure: _GRAVITY.index(failure[0]))


def _fate(error: BaseException) -> Fate:
    if isinstance(error, EnvError):
        return Fate.ENV_ERROR
    if isinstance(error, EngineError | PeerLost):
        return Fate.ENGINE_ERROR
    if isinstance(error, ContextOverflow):
        return Fate.TRUNCATED
    return Fate.AGENT_ERROR


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
