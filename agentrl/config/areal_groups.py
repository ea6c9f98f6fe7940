"""AReaL's keys that only say something together, such as the three that choose the proximal policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from agentrl.config.foreign import show
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
from agentrl.config.update_schema import ActorConfig

DECOUPLED, PROX_METHOD = "actor.use_decoupled_loss", "actor.prox_logp_method"
RECOMPUTE = ("actor.recompute_logprob", "actor.recompute_logprobs")


def _proximal(view: View) -> Mapping[str, Any]:
    decoupled, method = flag(view, DECOUPLED), view.foreign(PROX_METHOD)
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
    values = {name: flag(view, name) for name in RECOMPUTE if view.foreign(name) is not None}
    if len(set(values.values())) > 1:
        raise Contradiction(
            RECOMPUTE, f"is {show(values[RECOMPUTE[0]])}, but {_said(*[*values.items()][1])}", "keep one"
        )
    return next(iter(values.items()), (RECOMPUTE[0], None))


def _said(name: str, value: Any) -> str:
    return f"{name} is {'not given' if value is None else show(value)}"


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
    return {f"{_CORRECTION}.rollout_is": "token", f"{_CORRECTION}.rollout_is_threshold": bound}


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


BETAS = ("actor.optimizer.beta1", "actor.optimizer.beta2")


def _betas(view: View) -> Mapping[str, Any]:
    defaults = view.value("actor.optim.betas")
    pairs = zip(BETAS, defaults, strict=True)
    return {
        "actor.optim.betas": [default if view.foreign(name) is None else view.foreign(name) for name, default in pairs]
    }


NORMS = ("actor.reward_norm", "actor.adv_norm")


def _choose(view: View) -> str:
    proposal = (
        "gae, which reads the critic"
        if _has_critic(view)
        else "reinforce_plus_plus, which whitens what follows a token"
    )
    return f"set algorithm.adv_estimator too ({proposal}); it then gets the rewards as the norms make them"


def _has_critic(view: View) -> bool:
    return view.given("critic.path") is not None


def _norms(view: View) -> Mapping[str, Any]:
    """AReaL has no estimators: an advantage is the normalised reward. That is GRPO, Dr.GRPO or RLOO by its settings."""
    reward, advantage = (_norm(view, name) for name in NORMS)
    keys: dict[str, Any] = {} if advantage is None else {"algorithm.adv_norm": advantage}
    if view.given("algorithm.adv_estimator") is not None:
        return keys if reward is None else {"algorithm.reward_norm": reward, **keys}
    if _has_critic(view):
        name = NORMS[1] if reward is None else NORMS[0]
        raise Contradiction((name,), "is given with a critic, and no estimator is named that reads it", _choose(view))
    own = {"eps": 1e-5, "std_unbiased": True}  # AReaL's, of which an estimator has its own
    if reward is None:
        reason = "is given without a normalisation of rewards: AReaL then takes rewards as they are for advantages"
        raise Contradiction((NORMS[1],), reason, _choose(view))
    if view.foreign(KL[0]):
        raise Contradiction(
            (NORMS[0], KL[0]),
            f"is given with {KL[0]}, which AReaL takes off after it has compared the episodes, and agentrl before",
            _choose(view),
        )
    if any(reward.get(name, value) != value for name, value in own.items()):
        raise Contradiction((NORMS[0],), f"sets {' or '.join(own)}, which estimators have of their own", _choose(view))
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
            _choose(view),
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
    used, details = flag(view, LORA[0]), {name: view.foreign(name) for name in LORA[1:]}
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

LEVEL, CISPO, SAPO = "actor.importance_sampling_level", "actor.use_cispo_loss", "actor.use_sapo_loss"
TAUS = ("actor.sapo_tau_pos", "actor.sapo_tau_neg")


def _loss(view: View) -> Mapping[str, Any]:
    """AReaL's switches between losses, of which one may be on."""
    level = view.foreign(LEVEL)
    if level not in (None, "token", "sequence"):
        raise Contradiction((LEVEL,), f"is {level}", "set it to token or sequence")
    on = {SAPO: flag(view, SAPO), CISPO: flag(view, CISPO), LEVEL: level == "sequence"}
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


CONCURRENT = "rollout.max_concurrent_rollouts"


def _concurrent(view: View) -> Mapping[str, Any]:
    """AReaL counts groups in flight, `rollout.max_concurrent` episodes."""
    groups, episodes = view.foreign(CONCURRENT), view.value("rollout.n")
    check_count(CONCURRENT, groups)
    return {"rollout.max_concurrent": groups * episodes} if is_count(episodes) else {}


_CORRECTION = "algorithm.rollout_correction"

AREAL_GROUPS: tuple[Group, ...] = (
    Group(
        "AReaL",
        names=(DECOUPLED, *RECOMPUTE, PROX_METHOD),
        gives=("actor.proximal",),
        needs=(),
        read=_proximal,
        meaning="actor.proximal",
    ),
    Group(
        "AReaL",
        names=("actor.eps_clip", "actor.eps_clip_higher"),
        gives=CLIP_KEYS,
        needs=(),
        read=clip_range("actor.eps_clip", "actor.eps_clip", "actor.eps_clip_higher"),
        meaning=CLIP,
    ),
    Group(
        "AReaL",
        names=(CAP, CAP_MODE, REJECTION),
        gives=(f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_threshold"),
        needs=(),
        read=_behaviour_weight,
        meaning="algorithm.rollout_correction.rollout_is and rollout_is_threshold",
    ),
    Group(
        "AReaL",
        names=BETAS,
        gives=("actor.optim.betas",),
        needs=(),
        read=_betas,
        meaning="actor.optim.betas",
    ),
    Group(
        "AReaL",
        names=NORMS,
        gives=(
            "algorithm.adv_estimator",
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.reward_norm",
            "algorithm.adv_norm",
        ),
        needs=("algorithm.adv_estimator", "critic.path"),
        read=_norms,
        meaning="algorithm.adv_estimator, if none is given, else algorithm.reward_norm; and algorithm.adv_norm",
    ),
    Group("AReaL", names=LORA, gives=LORA_KEYS, needs=(), read=_lora, meaning=LORA_MEANING),
    Group(
        "AReaL",
        names=KL,
        gives=("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
        needs=(),
        read=_kl,
        meaning="algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef and algorithm.kl_penalty",
    ),
    Group(
        "AReaL",
        names=OVERLONG,
        gives=OVERLONG_KEYS,
        needs=(),
        read=overlong(OVERLONG),
        meaning=OVERLONG_MEANING,
    ),
    Group(
        "AReaL",
        names=(LEVEL, SAPO, *TAUS, CISPO),
        gives=("actor.loss_mode", "actor.loss_agg_mode", "actor.tau_pos", "actor.tau_neg"),
        needs=(),
        read=_loss,
        meaning="actor.loss_mode; some as means over sequences",
    ),
    Group(
        "AReaL",
        names=(CONCURRENT,),
        gives=("rollout.max_concurrent",),
        needs=("rollout.n",),
        read=_concurrent,
        meaning="rollout.max_concurrent, which counts episodes: multiplied by rollout.n",
    ),
)
