"""verl's keys that only say something together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentrl.config.key_groups import (
    CLIP,
    CLIP_KEYS,
    LORA_KEYS,
    LORA_MEANING,
    OVERLONG_KEYS,
    OVERLONG_MEANING,
    Contradiction,
    Group,
    View,
    check_count,
    clip_range,
    flag,
    is_count,
    overlong,
)
from agentrl.config.verl_names import ACTOR, BUFFERS, MODEL

_CLIP_KEYS = tuple(f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))

LORA = tuple(f"{MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))


def _lora(view: View) -> Mapping[str, Any]:
    """A rank of 0 is none, whatever stands beside it."""
    values = {f"model.{name.rpartition('.')[2]}": view.foreign(name) for name in LORA}
    given = {key: value for key, value in values.items() if value is not None}
    return given if given.get("model.lora_rank") != 0 else {}


KL = tuple(f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))


def _kl(view: View) -> Mapping[str, Any]:
    """verl's switch, and what only counts with it."""
    used, details = flag(view, KL[0]), KL[1:]
    if not used:
        return {}
    values = {f"actor.{name.rpartition('.')[2]}": view.foreign(name) for name in details}
    return {"actor.use_kl_loss": True} | {key: value for key, value in values.items() if value is not None}


LOSS_MODE, BYPASS = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"


def _loss_mode(view: View) -> Mapping[str, Any]:
    """Under `bypass_mode` verl forgets which loss was chosen."""
    mode = view.foreign(LOSS_MODE)
    bypass = view.written("actor.proximal") == BYPASS and view.given("actor.proximal") == "bypass"
    if bypass and mode not in ("vanilla", "bypass_mode"):
        raise Contradiction(
            (LOSS_MODE, BYPASS),
            f"is {mode}, but {BYPASS} is true, with which verl trains its clipped PPO whatever the loss",
            f"set {LOSS_MODE} to vanilla for that; for {mode} around the behaviour policy write actor.loss_mode and "
            "actor.proximal: bypass",
        )
    return {"actor.loss_mode": mode}


OVERLONG = tuple((f"{section}.enable", f"{section}.len", f"{section}.penalty_factor") for section in BUFFERS)


MINI, REQUIRED = "actor.ppo_mini_batch_size", "async_training.require_batches"
TOTAL = "rollout.total_rollout_steps"


def _total(view: View) -> Mapping[str, Any]:
    """verl counts the groups of a whole run."""
    total, factors = view.foreign(TOTAL), (view.value(MINI), view.value(REQUIRED))
    check_count(TOTAL, total)
    return {"trainer.total_steps": math.ceil(total / math.prod(factors))} if all(map(is_count, factors)) else {}


VERL_GROUPS: tuple[Group, ...] = (
    Group("verl", names=_CLIP_KEYS, gives=CLIP_KEYS, needs=(), read=clip_range(*_CLIP_KEYS), meaning=CLIP),
    Group("verl", names=LORA, gives=LORA_KEYS, needs=(), read=_lora, meaning=LORA_MEANING),
    Group(
        "verl",
        names=KL,
        gives=("actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"),
        needs=(),
        read=_kl,
        meaning="actor.use_kl_loss, actor.kl_loss_coef and actor.kl_loss_type",
    ),
    Group(
        "verl",
        names=(LOSS_MODE,),
        gives=("actor.loss_mode",),
        needs=("actor.proximal",),
        read=_loss_mode,
        meaning="actor.loss_mode",
    ),
    *(
        Group(
            "verl",
            names=names,
            gives=OVERLONG_KEYS,
            needs=(),
            read=overlong(names),
            meaning=OVERLONG_MEANING,
        )
        for names in OVERLONG
    ),
    Group(
        "verl",
        names=(TOTAL,),
        gives=("trainer.total_steps",),
        needs=(MINI, REQUIRED),
        read=_total,
        meaning=f"trainer.total_steps, after division by the groups of a training step, {MINI} x {REQUIRED}",
    ),
)
