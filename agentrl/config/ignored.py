"""Keys that act only under some condition. Giving one where it has no effect is an error, never a silent no-op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.config import names
from agentrl.config.errors import Problem
from agentrl.config.schema import MixedEnvironmentConfig, RunConfig

_CORRECTION = "algorithm.rollout_correction"


def given(config: RunConfig, key: str) -> bool:
    """Whether `key` was written in a file or override, and not left to its default."""
    model: Any = config
    *sections, leaf = key.split(".")
    for section in sections:
        model = model[section] if isinstance(model, dict) else getattr(model, section)
    if isinstance(model, dict):
        return leaf in model
    # An empty mapping is how an override takes back what a file gives.
    return leaf in model.model_fields_set and getattr(model, leaf) != {}


def ignored_keys(config: RunConfig) -> list[Problem]:
    """The keys without effect under this configuration, given or not, each with the reason and the remedy."""
    rules = (
        *(_single, _tasks, _environments, _sampling, _endings, _validation, _engines, _transport, _gateway),
        *(_advantages, _kl, _models, _correction, _update, _loss),
    )
    return [problem for rule in rules for problem in rule(config)]


def _single(config: RunConfig) -> Iterator[Problem]:
    """What says in one place what `environments` says for each of several."""
    if not config.environments:
        return
    name = next(iter(config.environments))
    keys = ("train", "train_args", "val", "val_args", "prompt_key", "answer_key")
    for key in (*(f"data.{key}" for key in keys), "agent", "env"):
        own = f"environments.{name}.{key.removeprefix('data.')}"
        yield Problem(
            key,
            "has no effect with environments, each of which has its own",
            f"move it to {own}, or remove environments",
            others=("environments",),
        )


def _parts(config: RunConfig) -> Iterator[tuple[str, str, MixedEnvironmentConfig]]:
    """Each environment, with the prefixes of its keys about tasks, and of its sections `agent` and `env`."""
    for name, part in config.mixture.items():
        yield (f"environments.{name}.", f"environments.{name}.", part) if config.environments else ("data.", "", part)


def _tasks(config: RunConfig) -> Iterator[Problem]:
    for prefix, _, part in _parts(config):
        train, val = f"{prefix}train", f"{prefix}val"
        if is_file(part.train):
            yield _no_arguments(train, part.train)
        if part.val is None:
            yield _no_held_out_tasks(f"{val}_args", val)
        elif is_file(part.val):
            yield _no_arguments(val, part.val)
        if all(is_function(source) for source in (part.train, part.val) if source is not None):
            for key in ("prompt_key", "answer_key"):
                yield Problem(
                    f"{prefix}{key}",
                    f"is about the rows of a file, but {train} = {part.train} is a function",
                    "remove it, and let the function return tasks with that prompt and answer",
                    others=(train,),
                )


def is_function(source: str) -> bool:
    """Whether a data source names a `package.module:function`."""
    return ":" in source and not is_file(source)


def is_file(source: str) -> bool:
    """Whether a data source names a file. What is neither that nor a function is the hub id of a data set."""
    return source.endswith((".jsonl", ".parquet"))


def _no_arguments(key: str, source: str) -> Problem:
    return Problem(
        f"{key}_args",
        f"is given, but {key} = {source} is a file and takes no arguments",
        f"remove {key}_args (to clear what a file says: {key}_args={{}}), or set {key} to a function",
        others=(key,),
    )


def _environments(config: RunConfig) -> Iterator[Problem]:
    for _, prefix, part in _parts(config):
        if part.env.cls is None:
            yield Problem(
                f"{prefix}env.args",
                f"is given, but {prefix}env.cls names no environment",
                f"set {prefix}env.cls to package.module:Class, or remove {prefix}env.args",
                others=(f"{prefix}env.cls",),
            )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    if config.data.sampler is None:
        yield Problem(
            "data.sampler_args",
            "is given, but data.sampler names no sampler",
            "set data.sampler to package.module:Class, or remove data.sampler_args",
            others=("data.sampler",),
        )
    else:
        yield Problem(
            "data.shuffle",
            f"has no effect with data.sampler = {config.data.sampler}, which decides on the order",
            "remove it, or remove data.sampler",
            others=("data.sampler",),
        )


def _endings(config: RunConfig) -> Iterator[Problem]:
    keys = ("on_agent_error", "on_timeout", "on_truncation")
    if all(getattr(config.rollout, key) != "score" for key in keys):
        yield Problem(
            "rollout.unscored_reward",
            f"has no effect: {', '.join(f'rollout.{key}' for key in keys)} leave out what nobody judged",
            "set one of them to score, or remove it",
            others=tuple(f"rollout.{key}" for key in keys),
        )


def _gateway(config: RunConfig) -> Iterator[Problem]:
    if not config.plays_outside:
        yield Problem(
            "gateway.idle_timeout",
            "is about episodes that agents from outside open, but this run plays its own",
            f"start the run with `agentrl serve`, set agent.loop to {names.OUTSIDE_AGENT}, or remove it (running "
            "episodes end after rollout.episode_timeout)",
            others=("agent.loop",),
        )


def _validation(config: RunConfig) -> Iterator[Problem]:
    if config.validates:
        if config.val.temperature == 0:
            for key in ("val.top_p", "val.top_k"):
                yield Problem(
                    key,
                    "has no effect with val.temperature = 0: the most likely token is taken",
                    f"set val.temperature above 0, or remove {key}",
                    others=("val.temperature",),
                )
        return
    keys = [f"val.{key}" for key in ("n", "temperature", "top_p", "top_k", "limit")]
    if config.trainer.val_before_train:  # false without held-out tasks is no mistake
        keys.append("trainer.val_before_train")
    for key in keys:
        yield _no_held_out_tasks(key, "environments.NAME.val" if config.environments else "data.val")


def _no_held_out_tasks(key: str, source: str) -> Problem:
    return Problem(
        key,
        f"has no effect: {source} names no held-out tasks",
        f"set {source}, or remove {key}",
        others=(source,),
    )


def _engines(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "torch":
        for key in ("engine_urls", "engine_args", "tensor_parallel_size"):
            yield Problem(
                f"rollout.{key}",
                "has no effect with rollout.engine = torch, whose engines are the run's own, with one device each",
                f"remove it, or set rollout.engine to vllm or sglang (to clear what a file says: "
                f"rollout.{key}={_CLEARED[key]})",
                others=("rollout.engine",),
            )
    elif rollout.engine_urls:
        keys = ("n_gpus_per_node", "tensor_parallel_size", "engine_args", "kv_cache_tokens", "threads")
        for key in keys:
            yield Problem(
                f"rollout.{key}",
                "has no effect with rollout.engine_urls: those servers are started elsewhere",
                "remove it and give it to the server, or remove rollout.engine_urls",
                others=("rollout.engine_urls",),
            )


_CLEARED = {"engine_urls": "[]", "engine_args": "{}", "tensor_parallel_size": "1"}


def _transport(config: RunConfig) -> Iterator[Problem]:
    for key, transport in (("directory", "disk"), ("host", "collective")):
        if config.weight_transport != transport:
            yield Problem(
                f"weights.{key}",
                f"has no effect with weights.transport = {config.weight_transport}",
                f"set weights.transport to {transport}, or remove it",
                others=("weights.transport",),
            )


def _advantages(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    estimator = algorithm.adv_estimator
    for key, readers in names.ESTIMATOR_CONSTANTS.items():
        undiscounted = key in ("gamma", "lam") and getattr(algorithm, key) == 1  # which is what the others do
        if estimator not in readers and estimator in names.ADV_ESTIMATORS and not undiscounted:
            yield Problem(
                f"algorithm.{key}",
                f"has no effect with algorithm.adv_estimator = {estimator}",
                f"remove it, or set algorithm.adv_estimator to {' or '.join(readers)}",
                others=("algorithm.adv_estimator",),
            )
    if estimator == "gdpo":
        keys = ["reward_bias", "reward_scaling", "reward_clip", "overlong_buffer_len", "reward_norm"]
        keys += ["use_kl_in_reward"] if algorithm.use_kl_in_reward else []
        for key in (*(f"algorithm.{key}" for key in keys), "rollout.unscored_reward"):
            yield Problem(
                key,
                "has no effect with algorithm.adv_estimator = gdpo, which compares the parts of the rewards instead",
                "remove it, or set algorithm.adv_estimator to grpo",
                others=("algorithm.adv_estimator",),
            )
    if config.actor.loss_agg_mode == "episode-mean":
        yield Problem(
            "algorithm.branch_weighting",
            "has no effect with actor.loss_agg_mode = episode-mean: in it all tokens of an episode count the same",
            "remove it, or set actor.loss_agg_mode to seq-mean-token-mean",
            others=("actor.loss_agg_mode",),
        )
    if algorithm.overlong_buffer_len is None:
        yield _needs("algorithm.overlong_penalty_factor", "algorithm.overlong_buffer_len", "a number of tokens")
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(algorithm, key)
        if norm is not None and norm.mean_level is None:
            yield _needs(f"algorithm.{key}.mean_leave1out", f"algorithm.{key}.mean_level", "batch or group")
        if norm is not None and norm.std_level is None:
            for own in ("std_unbiased", "eps"):
                yield _needs(f"algorithm.{key}.{own}", f"algorithm.{key}.std_level", "batch or group")


def _kl(config: RunConfig) -> Iterator[Problem]:
    control = "algorithm.kl_ctrl"
    if not config.algorithm.use_kl_in_reward:
        yield _needs("algorithm.kl_penalty", "algorithm.use_kl_in_reward", "true")
        if config.algorithm.kl_ctrl.kl_coef > 0:  # 0 says the same
            yield _needs(control, "algorithm.use_kl_in_reward", "true")
    elif config.algorithm.kl_ctrl.type == "fixed":
        for key in ("target_kl", "horizon"):
            yield _needs(f"{control}.{key}", f"{control}.type", "adaptive")
    if not config.actor.use_kl_loss:
        for key in ("kl_loss_coef", "kl_loss_type"):
            yield _needs(f"actor.{key}", "actor.use_kl_loss", "true")


def _models(config: RunConfig) -> Iterator[Problem]:
    if not config.has_critic:
        for key in ("critic", "trainer.critic_warmup"):
            yield _needs(key, "algorithm.adv_estimator", "gae, the estimator with a critic")
    if not config.model.lora_rank:
        for key in ("lora_alpha", "target_modules", "lora_merge"):
            yield _needs(f"model.{key}", "model.lora_rank", "a number above 0")


def _needs(key: str, other: str, value: str) -> Problem:
    """A key that only acts if another one has some value."""
    return Problem(key, f"has no effect without {other}", f"set {other} to {value}, or remove {key}", others=(other,))


def _correction(config: RunConfig) -> Iterator[Problem]:
    correction, bypass = config.algorithm.rollout_correction, config.actor.proximal == "bypass"
    if bypass and correction.loss_type == "ppo_clip":
        keys = ["rollout_is_threshold", "rollout_is_batch_normalize"]
        if correction.rollout_is is not None:  # null says the same as bypass does
            keys.append("rollout_is")
        for key in keys:
            yield Problem(
                f"{_CORRECTION}.{key}",
                f"has no effect with actor.proximal = bypass and {_CORRECTION}.loss_type = ppo_clip: the ratio "
                "current / behaviour already holds the weight",
                f"remove it, or set {_CORRECTION}.loss_type to reinforce, or actor.proximal to recompute",
                others=("actor.proximal", f"{_CORRECTION}.loss_type"),
            )
    elif correction.rollout_is is None:
        yield Problem(
            f"{_CORRECTION}.rollout_is_threshold",
            f"bounds a weight, but {_CORRECTION}.rollout_is is null",
            f"set {_CORRECTION}.rollout_is to token or sequence, or remove the threshold",
            others=(f"{_CORRECTION}.rollout_is",),
        )
    if not bypass:
        yield Problem(
            f"{_CORRECTION}.loss_type",
            f"chooses the loss of actor.proximal = bypass, but actor.proximal = {config.actor.proximal}",
            "set actor.proximal to bypass, or remove loss_type",
            others=("actor.proximal",),
        )
    if correction.bypass_mode != bypass:  # verl's name for the same choice, and read as it; see verl_names.py
        wanted = "bypass" if correction.bypass_mode else "recompute"
        yield Problem(
            f"{_CORRECTION}.bypass_mode",
            f"is {str(correction.bypass_mode).lower()}, but actor.proximal = {config.actor.proximal}",
            f"set actor.proximal to {wanted}, or remove bypass_mode",
            others=("actor.proximal",),
        )


def _update(config: RunConfig) -> Iterator[Problem]:
    actor, correction = config.actor, config.algorithm.rollout_correction
    if actor.proximal == "bypass" and correction.loss_type == "reinforce":
        keys = ["clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
        if actor.loss_mode != "bypass_mode":
            keys.append("loss_mode")
        for key in keys:
            yield Problem(
                f"actor.{key}",
                f"has no effect with actor.proximal = bypass and {_CORRECTION}.loss_type = reinforce: the loss "
                "is -w A log p",
                f"remove it, or set {_CORRECTION}.loss_type to ppo_clip",
                others=("actor.proximal", f"{_CORRECTION}.loss_type"),
            )
    if actor.proximal == "bypass":
        yield Problem(
            "actor.prox_anchor",
            "has no effect with actor.proximal = bypass: the behaviour policy is the anchor",
            "remove it, or set actor.proximal to recompute or loglinear",
            others=("actor.proximal",),
        )
    elif actor.prox_anchor == "publish" and config.async_training.trigger_parameter_sync_step == 1:
        yield Problem(
            "actor.prox_anchor",
            "is publish, but with async_training.trigger_parameter_sync_step = 1 every training step starts with the "
            "weights of the last publication",
            "remove it, or set async_training.trigger_parameter_sync_step to 2 or more",
            others=("async_training.trigger_parameter_sync_step",),
        )
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Problem(
            "actor.loss_scale_factor",
            f"has no effect with actor.loss_agg_mode = {actor.loss_agg_mode}",
            "remove it, or set actor.loss_agg_mode to seq-mean-token-sum-norm",
            others=("actor.loss_agg_mode",),
        )
    optimisers = [("actor", actor.optim), *([("critic", config.critic.optim)] if config.has_critic else [])]
    for section, optim in optimisers:
        if optim.lr_scheduler_type == "constant":
            yield Problem(
                f"{section}.optim.min_lr_ratio",
                f"has no effect with {section}.optim.lr_scheduler_type = constant",
                f"set {section}.optim.lr_scheduler_type to linear or cosine, or remove min_lr_ratio",
                others=(f"{section}.optim.lr_scheduler_type",),
            )


def _loss(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor
    mode = actor.loss_mode
    if mode not in names.LOSS_MODES:
        return
    if not (actor.proximal == "bypass" and config.algorithm.rollout_correction.loss_type == "reinforce"):
        readers = {"clip_ratio_low": names.CLIPPING, "clip_ratio_high": names.CLIPPING}
        for key, modes in {**readers, "clip_ratio_c": names.DUAL_CLIPPING}.items():
            if mode not in modes:
                yield _not_read(key, mode, " or ".join(modes))
    for key, reader in names.LOSS_CONSTANTS.items():
        if mode != reader:
            yield _not_read(key, mode, reader)


def _not_read(key: str, mode: str, readers: str) -> Problem:
    return Problem(
        f"actor.{key}",
        f"has no effect with actor.loss_mode = {mode}",
        f"remove it, or set actor.loss_mode to {readers}",
        others=("actor.loss_mode",),
    )
