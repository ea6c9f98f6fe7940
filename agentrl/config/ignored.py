"""Keys that act only under some condition. Giving one where it has no effect is an error, never a silent no-op."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from agentrl.config.errors import Problem
from agentrl.config.schema import RunConfig

_CORRECTION = "algorithm.rollout_correction"


def given(config: RunConfig, key: str) -> bool:
    """Whether `key` was written in a file or override, and not left to its default."""
    model: BaseModel = config
    *sections, leaf = key.split(".")
    for section in sections:
        model = getattr(model, section)
    return leaf in model.model_fields_set


def ignored_keys(config: RunConfig) -> list[Problem]:
    """The keys without effect under this configuration, given or not, each with the reason and the remedy."""
    rules = (_data, _environment, _validation, _advantages, _correction, _update)
    return [problem for rule in rules for problem in rule(config)]


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if not is_function(data.train):
        yield _no_arguments("data.train", data.train)
    if data.val is not None and not is_function(data.val):
        yield _no_arguments("data.val", data.val)
    if all(is_function(source) for source in (data.train, data.val) if source is not None):
        for key in ("prompt_key", "answer_key"):
            yield Problem(
                f"data.{key}",
                f"is about the rows of a file, but data.train = {data.train} is a function",
                "remove it, and let the function return tasks with that prompt and answer",
                others=("data.train",),
            )


def is_function(source: str) -> bool:
    """Whether a data source names a `package.module:function` rather than a file."""
    return ":" in source and not source.endswith(".jsonl")


def _no_arguments(key: str, source: str) -> Problem:
    return Problem(
        f"{key}_args",
        f"is given, but {key} = {source} is a file and takes no arguments",
        f"remove {key}_args, or set {key} to a function: package.module:function",
        others=(key,),
    )


def _environment(config: RunConfig) -> Iterator[Problem]:
    if config.env.cls is None:
        yield Problem(
            "env.args",
            "is given, but env.cls names no environment",
            "set env.cls to package.module:Class, or remove env.args",
            others=("env.cls",),
        )


def _validation(config: RunConfig) -> Iterator[Problem]:
    if config.data.val is not None:
        return
    keys = ["data.val_args", "val.n", "val.temperature", "val.limit"]
    if config.trainer.val_before_train:  # false without held-out tasks is no mistake
        keys.append("trainer.val_before_train")
    for key in keys:
        yield Problem(
            key,
            "has no effect: data.val names no held-out tasks",
            f"set data.val, or remove {key}",
            others=("data.val",),
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
    if correction.bypass_mode != bypass:  # verl's name for the same choice
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
    if actor.optim.lr_scheduler_type == "constant":
        yield Problem(
            "actor.optim.min_lr_ratio",
            "has no effect with actor.optim.lr_scheduler_type = constant",
            "set actor.optim.lr_scheduler_type to linear or cosine, or remove min_lr_ratio",
            others=("actor.optim.lr_scheduler_type",),
        )
