"""What the rooms ask of each other. Components implement these; hosts decide where each one runs.

Every method may be called from another process: arguments and results are dataclasses of plain values and
arrays, and a failure is one of the typed errors in `errors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from agentrl.record.trajectory import Batch

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of running requests when an engine pauses: they stay as they are and go on later, end first, or end now
with what they have."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    Attributes:
        token_ids: int32 `[T]`, the whole prompt.
        max_tokens: most tokens to sample.
        temperature: 0 is greedy.
        stop_token_ids: sampling one of these ends the turn; it is part of the result.
        stop: the turn also ends with the token that completes one of these texts; it is part of the result.
        top_p, top_k: sample among the most likely tokens only (1 and -1: among all). The log-probs are then those of
            the truncated distribution, which can't be trained on.
        json_schema: JSON text of a schema; the answer is then one JSON value that fits it, and ends with it. Tokens are
            sampled among those that the schema allows, and log-probs are those of that distribution, which can't be
            trained on either.
        seed: with the same weights and prompt, the same tokens.
        min_version: an engine with older weights must not serve it.
    """

    request_id: str
    token_ids: np.ndarray
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    min_version: int = 0
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    json_schema: str = ""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was sampled.

    Attributes:
        token_ids: int32 `[T]`, including the stop token.
        logprobs: float32 `[T]`, under the distribution sampled from (after temperature).
        versions: int32 `[T]`, policy version each token was sampled under.
        finish_reason: `abort` if somebody else ended it: what is there is valid, but not an answer.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a bucket holds which bytes of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor_offset: int
    bucket_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights on their way: which bytes are which tensors.

    Attributes:
        index: position in its transfer; receivers get them in this order.
        segment: the file that holds the bytes, in shared memory or on disk; empty if they come over a collective.
        nbytes: bytes in use.
        checksum: of those bytes, see `agentrl.weights.bucket.checksum`.
    """

    index: int
    segment: str
    nbytes: int
    checksum: int
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group over which the trainer's rank 0 broadcasts weights.

    Attributes:
        name: of the group; a new one for every group.
        address: `host:port` of its store, which rank 0 serves.
        backend: of torch.distributed: gloo, nccl or hccl.
        world_size: the trainer's rank 0 and all workers of all engines.
        rank: of the engine's first worker; its others follow.
        timeout: seconds until a member gives up on the others.
    """

    name: str
    address: str
    backend: str
    world_size: int
    rank: int
    timeout: float


@dataclass(frozen=True, slots=True)
class WeightReceivers:
    """Who takes a publication.

    Attributes:
        names: of the engines; one that was started anew has another name than before.
        workers: of each, how many processes hold its weights.
    """

    names: tuple[str, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and what it does now.

    Attributes:
        prompt_tokens: computed as part of a prompt.
        cached_tokens: of prompts, reused from earlier ones.
        workers: processes that hold its weights (its tensor parallel size).
        busy_seconds: time with at least one sequence being computed.
        paused_seconds: time spent paused for updates.
    """

    version: int
    generated_tokens: int
    prompt_tokens: int
    busy_seconds: float
    paused_seconds: float
    running: int
    waiting: int
    cached_tokens: int = 0
    workers: int = 1


class Engine(Protocol):
    """A generation back end. `update_weights` is called between `start_` and `finish_weight_update`; after one of them
    failed, the next `start_weight_update` begins from nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def abort(self, request_ids: list[str]) -> None:
        """Ends requests; their `generate` returns with `finish_reason="abort"`."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling, after the current token unless `mode` is `wait`; new requests queue."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Gives back the memory that generation needs, weights included; running requests end with `abort`."""
        ...

    async def wake(self) -> None:
        """Takes memory again after `sleep`; the engine is paused and without valid weights until an update."""
        ...

    async def join_weight_group(self, group: WeightGroup) -> None:
        """From now on, buckets without a segment come over this group. Returns when all its members are there.

        Raises:
            WeightTransferError: they were not in time, or the engine can't take part.
        """
        ...

    async def start_weight_update(self) -> None:
        """The engine must be paused."""
        ...

    async def update_weights(self, bucket: Bucket) -> None: ...

    async def finish_weight_update(self, version: int) -> None:
        """Checks that all weights arrived, drops every cache of the old ones, and is at `version` from now on."""
        ...

    async def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One publication.

    Attributes:
        paused_seconds: time the engines were paused.
        drained_seconds: time before that, in which running episodes were left to finish.
        engines: how many took the update.
    """

    version: int
    paused_seconds: float
    drained_seconds: float
    engines: int


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Held-out results.

    Attributes:
        accuracy: share of judged episodes solved (reward part `accuracy` if the reward has one, else reward >= 1).
        reward: mean reward of judged episodes. Both are NaN without any.
        episodes: judged ones.
        failed: those that infrastructure kept from being judged; in no mean.
        version_first, version_last: policy versions of the oldest and newest token sampled.
        accuracies: by environment, where there are several.
    """

    accuracy: float
    reward: float
    episodes: int
    failed: int
    version_first: int
    version_last: int
    seconds: float
    accuracies: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The rollout side at a glance. Counters are since the start of the run.

    Attributes:
        fates: ended training episodes by fate; their sum and `in_flight` make `dispatched`.
        in_flight: dispatched episodes without a fate: running, queued, or being trained on.
        waiting_for: what the next batch waits for, in words.
        gateway: where agents from outside ask for episodes; empty if the run plays its own.
    """

    version: int
    dispatched: int
    in_flight: int
    fates: dict[str, int] = field(default_factory=dict)
    running_episodes: int = 0
    running_groups: int = 0
    queued_groups: int = 0
    capacity: int = 0
    generated_tokens: int = 0
    engine_busy_seconds: float = 0.0
    engines: int = 0
    waiting_for: str = ""
    gateway: str = ""


class RolloutService(Protocol):
    """The rollout side as the trainer sees it."""

    async def take_batch(self, version: int) -> Batch:
        """The next batch within the staleness bound; waits until there is one.

        Args:
            version: of the trainer's weights; by the time there is a batch they may have been published anew, and the
                batch then says so.

        Raises:
            RolloutEnded: no further batch will come.
            NoProgress: episodes keep ending without anything to train.
        """
        ...

    async def acknowledge(self, batch_id: int) -> None:
        """The batch was trained: its episodes end as `trained`."""
        ...

    async def begin_publish(self, reload: bool = False) -> WeightReceivers:
        """Pauses the engines for an update; without partial rollouts, after the running episodes have finished.

        Args:
            reload: the weights of the current version once more, for engines that wait for them; the others go on.

        Raises:
            EngineError: there is none to take it.
        """
        ...

    async def join_weight_group(self, group: WeightGroup) -> None:
        """The engines that `begin_publish` named become members, in that order; `group.rank` is that of the first."""
        ...

    async def abandon_publish(self, reason: str) -> None:
        """The trainer can't go on with the publication it began: engines in it wait for all weights."""
        ...

    async def weights_wanted(self) -> None:
        """Returns when an engine has started anew or failed an update, and needs weights before it can serve."""
        ...

    async def publish_bucket(self, bucket: Bucket) -> None:
        """Hands a bucket to every engine; returns when all have read it, so that it may be reused."""
        ...

    async def finish_publish(self, version: int) -> PublishReport:
        """Resumes the engines under `version` and, if it is a new one, opens the gate.

        Raises:
            EngineError: no engine accepted the update.
        """
        ...

    async def stop(self) -> None:
        """Ends all training episodes: no further batch will be taken."""
        ...

    async def validate(self) -> ValidationReport:
        """Plays the held-out tasks; training episodes go on meanwhile."""
        ...

    async def status(self) -> RolloutStatus: ...

    async def engine_lost(self, name: str, restarting: bool) -> None:
        """The host says that an engine's process has ended, and whether it starts another one in its place."""
        ...

    async def engine_restarted(self, name: str) -> None:
        """The host has started it; it takes requests again once it has the current weights."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """The trainer at a glance: a step's metrics row and what it does now.

    Attributes:
        total_steps: None if the run ends with its tasks.
        warning: what is wrong with the step whose row `metrics` is.
        problem: why training ended before its time, or was in vain.
    """

    step: int
    version: int
    total_steps: int | None
    phase: str
    phase_seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    val_first: float | None = None
    val_last: float | None = None
    warning: str = ""
    problem: str = ""
    done: bool = False
    error: str = ""


class TrainerService(Protocol):
    """The trainer as the supervisor sees it."""

    async def status(self, after_step: int) -> TrainerStatus:
        """State now. `metrics` is the row of the first step later than `after_step`, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """What became of the samples of one task.

    Attributes:
        judged: samples that count; the others were spoiled by infrastructure.
        solved: of those judged.
        rewards, turns: of each judged sample.
        failures: samples that nobody judged or that were cut off, by fate.
    """

    environment: str
    task_id: str
    judged: int
    solved: int
    rewards: list[float]
    turns: list[int]
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """A whole evaluation, task by task."""

    tasks: list[EvaluatedTask]
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """How far an evaluation is: episodes done, of how many, and how many were solved."""

    done: int
    total: int
    solved: int


class EvaluationService(Protocol):
    """An evaluation as its supervisor sees it."""

    async def evaluate(self) -> EvaluationReport:
        """Plays all tasks; called once."""
        ...

    async def status(self) -> EvaluationStatus: ...
