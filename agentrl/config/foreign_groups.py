"""Keys of verl and AReaL that only say something together, such as the three that choose AReaL's proximal policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from agentrl.config.foreign import show
from agentrl.config.schema import ActorConfig
from agentrl.config.verl_names import ACTOR, MODEL


class Contradiction(Exception):
    """Keys that do not go together.

    Args:
        keys: as they were written; the reason is about the first.
    """

    def __init__(self, keys: tuple[str, ...], reason: str, fix: str) -> None:
        super().__init__(reason)
        self.keys, self.reason, self.fix = keys, reason, fix


class View(Protocol):
    """The configuration as far as it is read."""

    def foreign(self, name: str) -> Any:
        """The value of a foreign key, None if it was not given."""
        ...

    def given(self, key: str) -> Any:
        """The value of a key here, under whatever name it was given; None if it was not."""
        ...

    def value(self, key: str) -> Any:
        """The same, or the default."""
        ...

    def written(self, key: str) -> str:
        """The name under which a key here was given."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Foreign keys that mean something together.

    Attributes:
        system: whose they are.
        names: the keys.
        needs: keys here that count too. If a later file or override changes one, the group is read again.
        read: the keys here and their values; raises `Contradiction`.
        meaning: what they come to, in words.
    """

    system: str
    names: tuple[str, ...]
    needs: tuple[str, ...]
    read: Callable[[View], Mapping[str, Any]]
    meaning: str


DECOUPLED, PROX_METHOD = "actor.use_decoupled_loss", "actor.prox_logp_method"
RECOMPUTE = ("actor.recompute_logprob", "actor.recompute_logprobs")


def _proximal(view: View) -> Mapping[str, Any]:
    decoupled, method = _flag(view, DECOUPLED), view.foreign(PROX_METHOD)
    recompute_key, recompute = _recompute(view)
    if not decoupled:
        if method is not None:
            raise Contradiction(
                (PROX_METHOD, DECOUPLED),
                f"is {method}, but it only counts with the decoupled loss, and {_said(DECOUPLED, decoupled)}",
                f"set {DECOUPLED} to true, or remove {PROX_METHOD}",
            )
        if recompute:
            raise Contradiction(
                (recompute_key, DECOUPLED),
                f"is true, but {_said(DECOUPLED, decoupled)}: AReaL then trains around the recomputed log-probs and "
                "forgets that others sampled",
                f"set {DECOUPLED} to true (actor.proximal: recompute), or {recompute_key} to false (actor.proximal: "
                "bypass); for AReaL's very loss write actor.proximal: recompute and "
                "algorithm.rollout_correction.rollout_is: null",
            )
        return {"actor.proximal": "bypass"}
    known = get_args(ActorConfig.model_fields["proximal"].annotation)
    method = method or "recompute"
    if method not in known or method == "bypass":
        raise Contradiction(
            (PROX_METHOD,),
            f"is {method}, and agentrl has no such proximal policy",
            f"set {PROX_METHOD} to recompute, or remove it; actor.proximal: {', '.join(known)}",
        )
    if method == "recompute" and recompute is False:
        raise Contradiction(
            (DECOUPLED, recompute_key),
            f"is true, which takes the proximal log-probs from a forward of their own, but {recompute_key} is false",
            f"set {recompute_key} to true, or {DECOUPLED} to false (actor.proximal: bypass)",
        )
    return {"actor.proximal": method}


def _recompute(view: View) -> tuple[str, bool | None]:
    """The spelling that was used, and its value."""
    values = {name: _flag(view, name) for name in RECOMPUTE if view.foreign(name) is not None}
    if len(set(values.values())) > 1:
        raise Contradiction(
            RECOMPUTE, f"is {show(values[RECOMPUTE[0]])}, but {_said(*[*values.items()][1])}", "keep one"
        )
    return next(iter(values.items()), (RECOMPUTE[0], None))


def _flag(view: View, name: str) -> bool | None:
    value = view.foreign(name)
    if value is not None and not isinstance(value, bool):
        raise Contradiction((name,), f"expected true or false; got {value!r}", "write true or false")
    return value


def _said(name: str, value: Any) -> str:
    return f"{name} is {'not given' if value is None else show(value)}"


def _clip_range(both: str, low: str, high: str) -> Callable[[View], Mapping[str, Any]]:
    def read(view: View) -> Mapping[str, Any]:
        bounds = {"actor.clip_ratio_low": low, "actor.clip_ratio_high": high}
        values = {
            key: view.foreign(name) if view.foreign(name) is not None else view.foreign(both)
            for key, name in bounds.items()
        }
        return {key: value for key, value in values.items() if value is not None}

    return read


CAP, CAP_MODE, REJECTION = "actor.behav_imp_weight_cap", "actor.behav_imp_weight_mode", "actor.rejection_sampling"
_NEVER_BELOW = 1e-9
"""A lower bound of the weight that is none: log ratios are clamped at -20 nats, which is 2e-9."""


def _behaviour_weight(view: View) -> Mapping[str, Any]:
    """AReaL drops the token (`mask`) or bounds its weight (`truncate`, `clamp`) above a cap."""
    cap, mode, rejection = view.foreign(CAP), view.foreign(CAP_MODE), view.foreign(REJECTION)
    lower: Any = None
    if rejection is not None:
        if cap is not None:
            raise Contradiction((REJECTION, CAP), f"and {CAP} say the same in two ways", "keep one of them")
        cap, lower, mode = _rejection(rejection)
    if mode not in (None, "token_mask", "token_truncate"):
        raise Contradiction(
            (CAP_MODE,),
            f"is {mode}: AReaL's sequence weight is a geometric mean, agentrl's a product",
            "set it to token_mask or token_truncate, or choose algorithm.rollout_correction.rollout_is yourself: "
            "token, sequence or null",
        )
    if cap is None:
        raise Contradiction((CAP_MODE, CAP), f"is {mode}, but {CAP} is not given", f"set {CAP}, or remove {CAP_MODE}")
    bound = cap if mode == "token_truncate" else [_NEVER_BELOW if lower is None else lower, cap]
    correction = "algorithm.rollout_correction"
    return {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_threshold": bound}


def _rejection(value: Any) -> tuple[Any, Any, str]:
    """Cap, lower bound and mode of AReaL's `rejection_sampling`."""
    known = {"level": "token", "metric": "ratio", "action": "mask", "agg": "mean", "upper": 5.0, "lower": None}
    if not isinstance(value, Mapping) or not value.keys() <= known.keys():
        raise Contradiction((REJECTION,), f"expected a section with {', '.join(known)}; got {value!r}", "write that")
    level, metric, action, _, upper, lower = ({**known, **value}[name] for name in known)
    truncates = action == "clamp"
    if (level, metric) != ("token", "ratio") or action not in ("mask", "clamp") or (truncates and lower):
        raise Contradiction(
            (REJECTION,),
            f"is {show(dict(value))}, which says something that agentrl has under other names",
            "set algorithm.rollout_correction: rollout_is and rollout_is_threshold bound the weight, rollout_rs and "
            "rollout_rs_threshold reject tokens and sequences by k1, k2 and k3",
        )
    return upper, lower, "token_truncate" if truncates else "token_mask"


BATCH = ("data.train_batch_size", "train_dataset.batch_size", "rollout.consumer_batch_size")
MINI_BATCHES = "actor.ppo_n_minibatches"
MINI, REQUIRED = "actor.ppo_mini_batch_size", "async_training.require_batches"


def _batch(view: View) -> Mapping[str, Any]:
    """A training step's groups, as so many mini-batches of so many groups."""
    name, groups = _groups_of_a_step(view)
    count, mini = view.foreign(MINI_BATCHES), view.given(MINI)
    for key, number in ((name, groups), (MINI_BATCHES, count)):
        _check_count(key, number)
    if (not _is_count(mini) and mini is not None) or not _is_count(view.value(REQUIRED)):
        return {}  # which is refused under its own name
    if groups is None:
        return {} if count is None else {REQUIRED: count}
    if mini is None:
        count = count or view.given(REQUIRED) or 1
        if groups % count:
            parts = f"{MINI_BATCHES if view.foreign(MINI_BATCHES) else view.written(REQUIRED)} = {count}"
            raise Contradiction(
                (name, parts.partition(" ")[0]),
                f"is {groups} groups a training step, which {parts} does not divide",
                f"set {name} to {_nearest_multiple(groups, count)}, or the number of mini-batches to one of "
                f"{_divisors(groups)}",
            )
        return {MINI: groups // count, REQUIRED: count}
    written = view.written(MINI)
    if mini > groups or groups % mini:
        reason = "the mini-batch is larger than the batch" if mini > groups else "that is not a whole number of them"
        raise Contradiction(
            (written, name),
            f"is {mini} groups, but {name} is {groups}: {reason}",
            f"set {written} to one of {_divisors(groups)}, or {name} to {_nearest_multiple(groups, mini)}",
        )
    return {REQUIRED: groups // mini} | ({} if count is None else {MINI: groups // count, REQUIRED: count})


def _groups_of_a_step(view: View) -> tuple[str, Any]:
    """The key that says it, and the number; 0 is verl's for "not used"."""
    given = {name: view.foreign(name) for name in BATCH if view.foreign(name) not in (None, 0)}
    if len(set(map(repr, given.values()))) > 1:
        (one, first), (two, second), *_ = given.items()
        raise Contradiction(
            (one, two),
            f"is {first}, but {two} is {second}: both are the groups of a training step",
            f"keep one of them, or write {MINI} and {REQUIRED}",
        )
    return next(iter(given.items()), (BATCH[0], None))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_count(name: str, value: Any) -> None:
    if value is not None and not _is_count(value):
        raise Contradiction((name,), f"expected integer, at least 1; got {value!r}", "write such a value")


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


TOTAL = "rollout.total_rollout_steps"


def _total(view: View) -> Mapping[str, Any]:
    """verl counts the groups of a whole run."""
    total, factors = view.foreign(TOTAL), (view.value(MINI), view.value(REQUIRED))
    _check_count(TOTAL, total)
    return {"trainer.total_steps": math.ceil(total / math.prod(factors))} if all(map(_is_count, factors)) else {}


CONCURRENT = "rollout.max_concurrent_rollouts"


def _concurrent(view: View) -> Mapping[str, Any]:
    """AReaL counts groups in flight, `rollout.max_concurrent` episodes."""
    groups, episodes = view.foreign(CONCURRENT), view.value("rollout.n")
    _check_count(CONCURRENT, groups)
    return {"rollout.max_concurrent": groups * episodes} if _is_count(episodes) else {}


BETAS = ("actor.optimizer.beta1", "actor.optimizer.beta2")


def _betas(view: View) -> Mapping[str, Any]:
    defaults = view.value("actor.optim.betas")
    pairs = zip(BETAS, defaults, strict=True)
    return {
        "actor.optim.betas": [default if view.foreign(name) is None else view.foreign(name) for name, default in pairs]
    }


VERL_LORA = tuple(f"{MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))


def _verl_lora(view: View) -> Mapping[str, Any]:
    """A rank of 0 is none, whatever stands beside it."""
    values = {f"model.{name.rpartition('.')[2]}": view.foreign(name) for name in VERL_LORA}
    given = {key: value for key, value in values.items() if value is not None}
    return given if given.get("model.lora_rank") != 0 else {}


VERL_KL = tuple(f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))


def _verl_kl(view: View) -> Mapping[str, Any]:
    """verl's switch, and what only counts with it."""
    used, details = _flag(view, VERL_KL[0]), VERL_KL[1:]
    if not used:
        return {}
    values = {f"actor.{name.rpartition('.')[2]}": view.foreign(name) for name in details}
    return {"actor.use_kl_loss": True} | {key: value for key, value in values.items() if value is not None}


NORMS = ("actor.reward_norm", "actor.adv_norm")


def _norms(view: View) -> Mapping[str, Any]:
    """AReaL has no estimators: an advantage is the normalised reward. That is GRPO, Dr.GRPO or RLOO by its settings."""
    reward, advantage = (_norm(view, name) for name in NORMS)
    keys: dict[str, Any] = {} if advantage is None else {"algorithm.adv_norm": advantage}
    if reward is None:
        return keys
    if view.given("algorithm.adv_estimator") is not None:
        return {"algorithm.reward_norm": reward, **keys}
    levels = (reward.get("mean_level", "batch"), reward.get("std_level", "batch"), bool(reward.get("mean_leave1out")))
    known = {
        ("group", "group", False): {"algorithm.adv_estimator": "grpo"},
        ("group", None, False): {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
        ("group", None, True): {"algorithm.adv_estimator": "rloo"},
    }
    if levels not in known:
        raise Contradiction(
            (NORMS[0],),
            "normalises rewards as no estimator does",
            "set algorithm.adv_estimator too (reinforce_plus_plus whitens what follows a token), which then gets the "
            "rewards normalised so",
        )
    return {**known[levels], **keys}


def _norm(view: View, name: str) -> dict[str, Any] | None:
    value = view.foreign(name)
    if value is not None and not isinstance(value, Mapping):
        raise Contradiction((name,), f"expected a section or null; got {value!r}", "write mean_level, std_level, ...")
    # Groups are those that were played together.
    return None if value is None else {key: own for key, own in value.items() if key != "group_size"}


LORA = ("actor.use_lora", "actor.lora_rank", "actor.lora_alpha", "actor.target_modules")


def _lora(view: View) -> Mapping[str, Any]:
    """AReaL's switch, and what only counts with it."""
    used, details = _flag(view, LORA[0]), {name: view.foreign(name) for name in LORA[1:]}
    if not used:
        return {}
    given = {f"model.{name.partition('.')[2]}": value for name, value in details.items() if value not in (None, [])}
    return {"model.lora_rank": 32, **given}


KL = ("actor.kl_ctl", "actor.kl_estimator")


def _kl(view: View) -> Mapping[str, Any]:
    """AReaL takes the penalty off the reward; a coefficient of 0 takes nothing."""
    coefficient, estimator = (view.foreign(name) for name in KL)
    if not coefficient:
        return {}
    return {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": coefficient,
        "algorithm.kl_penalty": estimator or "k1",
    }


OVERLONG = ("actor.overlong_reward_penalty", "actor.overlong_tokens", "actor.overlong_penalty_factor")


def _overlong(view: View) -> Mapping[str, Any]:
    used, tokens, factor = _flag(view, OVERLONG[0]), *(view.foreign(name) for name in OVERLONG[1:])
    if not used:
        return {}
    for name, value in zip(OVERLONG[1:], (tokens, factor), strict=True):
        if value is None:
            raise Contradiction((OVERLONG[0], name), f"is true, but {name} is not given", f"set {name}")
    return {"algorithm.overlong_buffer_len": tokens, "algorithm.overlong_penalty_factor": factor}


LEVEL, CISPO, SAPO = "actor.importance_sampling_level", "actor.use_cispo_loss", "actor.use_sapo_loss"
TAUS = ("actor.sapo_tau_pos", "actor.sapo_tau_neg")


def _loss(view: View) -> Mapping[str, Any]:
    """AReaL's switches between losses, of which one may be on."""
    level = view.foreign(LEVEL)
    if level not in (None, "token", "sequence"):
        raise Contradiction((LEVEL,), f"is {level}", "set it to token or sequence")
    on = {SAPO: _flag(view, SAPO), CISPO: _flag(view, CISPO), LEVEL: level == "sequence"}
    chosen = [name for name, used in on.items() if used]
    if len(chosen) > 1:
        raise Contradiction(tuple(chosen[:2]), f"and {chosen[1]} choose two losses", "keep one of them")
    if not chosen:
        return {}
    if chosen == [CISPO]:
        return {"actor.loss_mode": "cispo"}
    sequences = {"actor.loss_agg_mode": "seq-mean-token-mean"}
    if chosen == [LEVEL]:
        return {"actor.loss_mode": "gspo", **sequences}
    taus = zip(("actor.tau_pos", "actor.tau_neg"), (view.foreign(name) for name in TAUS), strict=True)
    return {"actor.loss_mode": "sapo", **sequences, **{key: value for key, value in taus if value is not None}}


_CLIP = "the ratio is clipped at 1 - actor.clip_ratio_low and 1 + actor.clip_ratio_high"
_VERL_CLIP = tuple(f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))

GROUPS: tuple[Group, ...] = (
    Group("AReaL", (DECOUPLED, *RECOMPUTE, PROX_METHOD), (), _proximal, "actor.proximal"),
    Group("verl", _VERL_CLIP, (), _clip_range(*_VERL_CLIP), _CLIP),
    Group(
        "AReaL",
        ("actor.eps_clip", "actor.eps_clip_higher"),
        (),
        _clip_range("actor.eps_clip", "actor.eps_clip", "actor.eps_clip_higher"),
        _CLIP,
    ),
    Group(
        "AReaL",
        (CAP, CAP_MODE, REJECTION),
        (),
        _behaviour_weight,
        "algorithm.rollout_correction.rollout_is and rollout_is_threshold",
    ),
    Group("AReaL", BETAS, (), _betas, "actor.optim.betas"),
    Group("verl", VERL_LORA, (), _verl_lora, "model.lora_rank, model.lora_alpha and model.target_modules"),
    Group("verl", VERL_KL, (), _verl_kl, "actor.use_kl_loss, actor.kl_loss_coef and actor.kl_loss_type"),
    Group(
        "AReaL",
        NORMS,
        ("algorithm.adv_estimator",),
        _norms,
        "algorithm.adv_estimator, if none is given, else algorithm.reward_norm; and algorithm.adv_norm",
    ),
    Group("AReaL", LORA, (), _lora, "model.lora_rank, model.lora_alpha and model.target_modules"),
    Group("AReaL", KL, (), _kl, "algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef and algorithm.kl_penalty"),
    Group(
        "AReaL",
        OVERLONG,
        (),
        _overlong,
        "algorithm.overlong_buffer_len and algorithm.overlong_penalty_factor; what counts is the longest turn",
    ),
    Group("AReaL", (LEVEL, SAPO, *TAUS, CISPO), (), _loss, "actor.loss_mode; some as means over sequences"),
    Group("verl and AReaL", (*BATCH, MINI_BATCHES), (MINI,), _batch, f"{MINI} x {REQUIRED}"),
    Group(
        "verl",
        (TOTAL,),
        (MINI, REQUIRED),
        _total,
        f"trainer.total_steps, after division by the groups of a training step, {MINI} x {REQUIRED}",
    ),
    Group(
        "AReaL",
        (CONCURRENT,),
        ("rollout.n",),
        _concurrent,
        "rollout.max_concurrent, which counts episodes: multiplied by rollout.n",
    ),
)
"""In the order they are read: the later ones may need what the earlier ones give."""
