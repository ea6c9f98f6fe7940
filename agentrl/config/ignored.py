"""Keys that act only under some condition. Giving one where it has no effect is an error, never a silent no-op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    rules = (_single, _tasks, _environments, _sampling, _endings, _validation, _advantages, _correction, _update)
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


def _advantages(config: RunConfig) -> Iterator[Problem]:
    estimator = config.algorithm.adv_estimator
    if estimator != "grpo":
        yield Problem(
            "algorithm.norm_adv_by_std_in_grpo",
            f"has no effect with algorithm.adv_estimator = {estimator}",
            "remove it, or set algorithm.adv_estimator to grpo",
            others=("algorithm.adv_estimator",),
        )


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
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Problem(
            "actor.loss_scale_factor",
            f"has no effect with actor.loss_agg_mode = {actor.loss_agg_mode}",
            "remove it, or set actor.loss_agg_mode to seq-mean-token-sum-norm",
            others=("actor.loss_agg_mode",),
        )
    if actor.optim.lr_scheduler_type == "constant":
        yield Problem(
            "actor.optim.min_lr_ratio",
            "has no effect with actor.optim.lr_scheduler_type = constant",
            "set actor.optim.lr_scheduler_type to linear or cosine, or remove min_lr_ratio",
            others=("actor.optim.lr_scheduler_type",),
        )
