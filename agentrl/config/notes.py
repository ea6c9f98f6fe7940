"""Lines shown when a run starts: which update is active, how stale data may be, and what is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor
from typing import Any

from agentrl.config.correction import Band, RolloutCorrectionConfig, ratio_band
from agentrl.config.names import CHOOSE_TOKENS, CLIPPING, RATIO_TERMS
from agentrl.config.schema import RunConfig


def config_notes(config: RunConfig) -> list[str]:
    """What this configuration amounts to, one line each; lines that start with `warning:` deserve a second look."""
    return [
        *_translations(config),
        *_policies(config),
        f"correction: {_correction(config)}",
        f"loss: {_loss(config)}",
        _staleness(config),
        *_length(config),
        *_unclipped(config),
        *_split(config),
    ]


def remember_translations(config: RunConfig, lines: Sequence[str]) -> None:
    """Keeps with a configuration which of its keys were written under other names.

    It is no field: two configurations are equal, and written to a file alike, whatever names they were given in.
    """
    vars(config)[_TRANSLATIONS] = tuple(lines)


_TRANSLATIONS = "translations"


def _translations(config: RunConfig) -> tuple[str, ...]:
    return vars(config).get(_TRANSLATIONS, ())


def update_path(config: RunConfig) -> dict[str, Any]:
    """What an update is made of: the policies by the part they play, the forwards over every token of a batch by their
    purpose, and the correction in words. Printed when a run starts and recorded in `environment.json`."""
    return {
        "policies": dict(_policy_roles(config)),
        "forwards": dict.fromkeys(_forwards(config), 1),
        "correction": _correction(config),
        "loss": _loss(config),
    }


def _policy_roles(config: RunConfig) -> Iterator[tuple[str, str]]:
    actor = config.actor
    yield "behaviour", "sampled the tokens"
    if actor.proximal != "bypass":
        start = "the last publication" if actor.prox_anchor == "publish" else "the start of the training step"
        how = f"weights at {start}" if actor.proximal == "recompute" else f"interpolated to the version at {start}"
        yield "proximal", how
    yield "current", "updated"
    if config.has_reference:
        yield "reference", "untrained, the adapters left out" if config.model.lora_rank else "untrained"


def _forwards(config: RunConfig) -> Iterator[str]:
    if config.actor.proximal == "recompute":
        yield "proximal log-probs"
    if config.has_reference:
        yield "reference log-probs"
    if config.has_critic:
        yield from ("values", "the critic's update")
    yield "the update"


def _policies(config: RunConfig) -> Iterator[str]:
    path = update_path(config)
    roles = [f"{name} ({what})" for name, what in path["policies"].items()]
    purposes = list(path["forwards"])
    count = f"{len(purposes)} forward{'' if len(purposes) == 1 else 's'} a token"
    yield f"policies: {', '.join(roles[:-1])} and {roles[-1]}; {count}: {', '.join(purposes)}"
    if config.algorithm.branch_weighting != "episode":
        yield f"branches: algorithm.branch_weighting = {config.algorithm.branch_weighting}"


def _loss(config: RunConfig) -> str:
    actor, correction = config.actor, config.algorithm.rollout_correction
    reinforce = actor.proximal == "bypass" and correction.loss_type == "reinforce"
    terms = ["reinforce" if reinforce else actor.loss_mode]
    if actor.use_kl_loss:
        terms.append(f"{actor.kl_loss_coef:g} KL ({actor.kl_loss_type})")
    if actor.entropy_coeff > 0:
        terms.append(f"entropy bonus {actor.entropy_coeff:g}")
    return f"{' + '.join(terms)}, {actor.loss_agg_mode}, advantages by {config.algorithm.adv_estimator}"


def _correction(config: RunConfig) -> str:
    correction, bypass = config.algorithm.rollout_correction, config.actor.proximal == "bypass"
    if bypass and correction.loss_type == "ppo_clip":
        has_ratio = config.actor.loss_mode in (*CLIPPING, "sapo", "kl_cov")
        weight = "no weight, the ratio is current / behaviour" if has_ratio else "no weight (actor.proximal: bypass)"
    elif correction.rollout_is is None:
        weight = "no weight (algorithm.rollout_correction.rollout_is: null)"
    else:
        ratio = "current / behaviour" if bypass else "proximal / behaviour"
        weight = f"{correction.rollout_is} weight {ratio}, {_bound(correction)}"
    limits = zip(correction.rollout_rs or (), correction.rollout_rs_threshold or (), strict=True)
    rejection = "".join(f"; rejected where {name} is {_outside(name, bound)}" for name, bound in limits)
    moment = "" if correction.m2_threshold is None else f"; second moment below {correction.m2_threshold:g}"
    return f"{weight}{rejection}{moment}"


def _bound(correction: RolloutCorrectionConfig) -> str:
    lower, upper = correction.weight_bounds()
    return f"truncated at {upper:g}" if lower is None else f"0 outside [{lower:g}, {upper:g}]"


def _outside(statistic: str, bound: float | Band) -> str:
    """What a bound of a rejection statistic leaves out."""
    if not statistic.endswith("k1"):
        return f"above {bound:g} nats"
    lower, upper = ratio_band(bound)
    return f"outside [{lower:g}, {upper:g}] (as a ratio)"


def _staleness(config: RunConfig) -> str:
    steps = config.async_training.trigger_parameter_sync_step
    admitted = floor(config.groups_per_step * steps * (1 + config.eta))
    return (
        f"staleness: a trained token is at most {config.max_lag} policy versions old; "
        f"{config.groups_per_step} groups of {config.rollout.n} a training step, new weights every "
        f"{'training step' if steps == 1 else f'{steps} training steps'}, at most {admitted} groups admitted between"
    )


def _length(config: RunConfig) -> Iterator[str]:
    if config.trainer.total_steps is None and config.trainer.total_epochs is None:
        yield "length: 1 pass over the training tasks (neither trainer.total_steps nor trainer.total_epochs given)"
    if not config.validates:
        yield f"validation: none ({'environments.NAME.val' if config.environments else 'data.val'} not given)"


def _unclipped(config: RunConfig) -> Iterator[str]:
    """One optimiser step from the anchor of the ratio: the ratio is 1 wherever the gradient is taken."""
    steps = config.async_training.require_batches
    if config.actor.prox_anchor == "publish":
        steps *= config.async_training.trigger_parameter_sync_step
    mode = config.actor.loss_mode
    idle = "clipping (actor.clip_ratio_low, actor.clip_ratio_high)" if mode in CLIPPING else RATIO_TERMS.get(mode)
    if config.actor.proximal == "bypass" or steps > 1 or idle is None:
        return
    weighted = config.algorithm.rollout_correction.rollout_is is not None
    yield (
        f"warning: actor.proximal = {config.actor.proximal} with async_training.require_batches = 1 makes current / "
        f"proximal exactly 1, so {idle} never acts; "
        f"{'only the correction weight does' if weighted else 'nothing accounts for stale tokens'}. To change that, "
        "set async_training.require_batches to 2 or more (with a smaller actor.ppo_mini_batch_size for the same "
        "batch), or actor.proximal to bypass"
    )


def _split(config: RunConfig) -> Iterator[str]:
    if config.actor.loss_mode in CHOOSE_TOKENS:
        yield (
            f"warning: actor.loss_mode = {config.actor.loss_mode} chooses tokens of one micro-batch at a time (as in "
            "verl), so that actor.ppo_max_token_len_per_gpu has a say in the loss"
        )
