"""One episode: an agent plays one task, and what comes out of it has a type."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentrl.config import RunConfig
from agentrl.config.schema import MixedEnvironmentConfig
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
from agentrl.rollout.outside import EpisodeTimeout, OutsideEpisodes, verdict_of
from agentrl.sdk import AgentLoop, Env, OutsideAgent, Reward, as_reward
from agentrl.sdk.plugin import load_class
from agentrl.session import BlockingPolicy, ChatFormat, Door, Generator, SamplingLimits, Session
from agentrl.session.blocking import in_thread

T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_RETRY_SECONDS = 0.25
"""Pause before a spoiled episode is played again; doubles with every attempt."""
_EXPLAINED = 100
"""Different errors of agents and environments whose traceback is logged; fates.jsonl has the reason of each episode."""
_GRAVITY = (Fate.ENGINE_ERROR, Fate.ENV_ERROR, Fate.AGENT_ERROR, Fate.TRUNCATED, Fate.TIMEOUT)


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
    def spoiled(self) -> bool:
        """Whether infrastructure kept it from being judged, so that it says nothing of the policy."""
        return self.failure in (Fate.ENV_ERROR, Fate.ENGINE_ERROR)

    @property
    def solved(self) -> bool:
        """Whether somebody judged it solved."""
        return self.reward is not None and self.reward.solved

    @property
    def usable(self) -> bool:
        """Whether it can be trained."""
        return self.failure is None and self.trajectory is not None and self.trajectory.sampled_tokens > 0


@dataclass(frozen=True, slots=True)
class Plugins:
    """The user's classes for one environment, found and checked, with the arguments of their constructors."""

    loop: type[AgentLoop]
    env: type[Env] | None = None
    loop_args: Mapping[str, Any] = field(default_factory=dict)
    env_args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, config: RunConfig) -> dict[str, Plugins]:
        """What a config names as agents and environments, by environment.

        Raises:
            PluginError: not found, of the wrong kind, or not built with these arguments.
        """
        return {
            name: cls._load(environment, f"environments.{name}." if config.environments else "")
            for name, environment in config.mixture.items()
        }

    @classmethod
    def _load(cls, config: MixedEnvironmentConfig, prefix: str) -> Plugins:
        env: type[Env] | None = None
        kwargs = dict(config.agent.args)
        if config.env.cls is not None:
            env = load_class(config.env.cls, Env, key=f"{prefix}env.cls", group="agentrl.envs", kwargs=config.env.args)
            kwargs["env"] = None
        loop = load_class(
            config.agent.loop, AgentLoop, key=f"{prefix}agent.loop", group="agentrl.agents", kwargs=kwargs
        )
        return cls(loop, env, config.agent.args, config.env.args)


class EpisodeRunner:
    """Plays episodes with the agents and environments of a config.

    A failure never escapes as an exception, and becomes a reward only where the config says `score`: it comes back
    typed. Only a cancellation from outside passes through.

    Args:
        plugins: by environment.
        ended: told the id of every session that is over.
        door: where agents of other frameworks reach their sessions.
        outside: who plays the episodes of an `OutsideAgent`.
    """

    def __init__(
        self,
        config: RunConfig,
        plugins: Mapping[str, Plugins],
        chat_format: ChatFormat,
        generator: Generator,
        ended: Callable[[str], None] = lambda episode_id: None,
        *,
        door: Door | None = None,
        outside: OutsideEpisodes | None = None,
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._format = chat_format
        self._generator = generator
        self._ended = ended
        self._door = door
        self._outside = outside
        self._explained: set[str] = set()

    async def play_until_judged(
        self,
        task: Task,
        *,
        group_id: str,
        episode_id: str,
        version: int,
        next_attempt: Callable[[], int],
        greedy: bool = False,
    ) -> Outcome:
        """Plays `task`, and plays it again while infrastructure spoils it, `rollout.max_attempts` times at most.

        Args:
            next_attempt: counts: the number of the attempt that now begins, from 1.
            greedy: always the likeliest token. Such an episode can't be trained.
        """
        while True:
            attempt = next_attempt()
            outcome = await self.play(
                task, group_id=group_id, episode_id=episode_id, version=version, attempt=attempt, greedy=greedy
            )
            if not outcome.spoiled or attempt >= self._config.rollout.max_attempts:
                return outcome
            await asyncio.sleep(_RETRY_SECONDS * 2 ** (attempt - 1))

    async def play(
        self, task: Task, *, group_id: str, episode_id: str, version: int, attempt: int = 1, greedy: bool = False
    ) -> Outcome:
        """Plays `task` once; no weights older than `version` answer. The agent gets a copy of its own."""
        task = copy.deepcopy(task)
        plugins = self._plugins[task.environment]
        session = Session(
            episode_id,
            self._format,
            self._generator,
            replace(self._limits(task), temperature=0.0) if greedy else self._limits(task),
            seed=self._config.data.seed,
            min_version=version,
            attempt=attempt,
            one_version=task.split == "train" and not self._config.async_training.partial_rollout,
            door=self._door,
        )
        started = time.monotonic()
        reward, failure, reason = await self._judge(task, plugins, session)
        seconds = time.monotonic() - started
        if failure is None and not session.graph.turns:
            failure, reason = Fate.AGENT_ERROR, f"{plugins.loop.__name__} returned without any model call"
            if session.used_over_http and self._door is not None:
                reason += f": it should have asked the model at {self._door.base_url}"
        cut = session.overflowed or any(turn.finish_reason == "length" for turn in session.graph.turns)
        status: Status = "truncated" if cut or failure is Fate.TRUNCATED else "aborted" if failure else "completed"
        if task.split == "train" and session.graph.turns:
            if failure is None and cut and self._policy(Fate.TRUNCATED) == "exclude":
                failure, reason = Fate.TRUNCATED, "a token limit cut it"
            elif failure is None and not any(turn.trained for turn in session.graph.turns):
                failure, reason = (
                    Fate.FILTERED,
                    "no turn can be trained: all were sampled under a grammar, or never taken",
                )
            elif failure is not None and self._policy(failure) == "score":
                reward, failure = Reward(self._config.rollout.unscored_reward), None
        trajectory = None
        if session.graph.turns:
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
                environment=task.environment,
            )
        return Outcome(trajectory, reward if failure is None else None, failure, reason, seconds)

    def _policy(self, failure: Fate) -> str:
        """What the config says of failures of this kind; those of infrastructure are never scored."""
        rollout = self._config.rollout
        policies = {
            Fate.AGENT_ERROR: rollout.on_agent_error,
            Fate.TIMEOUT: rollout.on_timeout,
            Fate.TRUNCATED: rollout.on_truncation,
        }
        return policies.get(failure, "exclude")

    def _limits(self, task: Task) -> SamplingLimits:
        config = self._config
        limits = SamplingLimits(
            temperature=config.rollout.temperature,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            max_model_len=config.rollout.max_model_len,
            stop=config.rollout.stop,
        )
        if task.split == "train":
            return limits
        return replace(limits, temperature=config.val.temperature, top_p=config.val.top_p, top_k=config.val.top_k)

    async def _judge(self, task: Task, plugins: Plugins, session: Session) -> tuple[Reward | None, Fate | None, str]:
        limit = self._config.rollout.episode_timeout
        env: Env | None = None
        playing: asyncio.Task[Any] | None = None
        try:
            env = _build_env(plugins)
            # In a task of its own: an agent may cancel itself, or swallow its cancellation, without holding the runner.
            if issubclass(plugins.loop, OutsideAgent):
                assert self._outside is not None
                limit = None  # its time begins when somebody asks for it
                playing = asyncio.create_task(self._outside.play(task, session))
            else:
                playing = asyncio.create_task(_run(task, plugins, session, env))
            await asyncio.wait({playing}, timeout=limit)
            if not playing.done():
                return None, Fate.TIMEOUT, f"ran longer than rollout.episode_timeout = {limit:g} s"
            reward = playing.result()
            if reward is None and session.verdict is not None:
                reward = verdict_of(session)
            return as_reward(reward), None, ""
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None, Fate.AGENT_ERROR, "the agent cancelled itself"
        except Exception as error:
            failure, cause = _failure(error)
            behind = session.last_failure if session.used_over_http and failure is Fate.AGENT_ERROR else None
            if behind is not None and _fate(behind) is not Fate.AGENT_ERROR:
                failure, cause = _fate(behind), behind  # what a framework's client raised about its last call
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


async def _run(task: Task, plugins: Plugins, session: Session, env: Env | None) -> Any:
    try:
        kwargs = dict(plugins.loop_args)
        if env is not None:
            kwargs["env"] = env
        loop = plugins.loop(**kwargs)
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
                f"{plugins.loop.__name__}: run is a plain function but returns a coroutine: declare it `async def`"
            )
        return result
    except SystemExit as error:
        raise RuntimeError(f"the agent called exit({error.code!r})") from error
    except KeyboardInterrupt as error:
        raise RuntimeError("the agent raised KeyboardInterrupt") from error


def _build_env(plugins: Plugins) -> Env | None:
    if plugins.env is None:
        return None
    try:
        return plugins.env(**plugins.env_args)
    except AgentRLError:
        raise
    except Exception as error:
        raise EnvError(f"{plugins.env.__name__} could not be built: {_describe(error)}") from error


async def _end(playing: asyncio.Task[Any], episode_id: str) -> None:
    """Cancels an agent that still runs; one that does not let itself be cancelled is left behind, and said so."""
    playing.cancel()
    await asyncio.wait({playing}, timeout=_CLOSE_SECONDS)
    if not playing.done():
        log.error("episode %s: its agent swallows its cancellation and goes on running", episode_id)
    elif not playing.cancelled():
        playing.exception()  # Nobody asks for it where the episode itself was cancelled; asyncio would complain.


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
    if isinstance(error, EpisodeTimeout):
        return Fate.TIMEOUT
    return Fate.AGENT_ERROR


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
