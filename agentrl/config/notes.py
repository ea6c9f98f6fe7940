"""Lines shown when a run starts: which update is active, how stale data may be, and what is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor

from agentrl.config.correction import RolloutCorrectionConfig
from agentrl.config.schema import RunConfig


def config_notes(config: RunConfig) -> list[str]:
    """What this configuration amounts to, one line each; lines that start with `warning:` deserve a second look."""
    return [
        *_translations(config),
        *_policies(config),
        _correction(config),
        _staleness(config),
        *_length(config),
        *_unclipped(config),
    ]


def remember_translations(config: RunConfig, lines: Sequence[str]) -> None:
    """Keeps with a configuration which of its keys were written under other names.

    It is no field: two configurations are equal, and written to a file alike, whatever names they were given in.
    """
    vars(config)[_TRANSLATIONS] = tuple(lines)


_TRANSLATIONS = "translations"


def _translations(config: RunConfig) -> tuple[str, ...]:
    return vars(config).get(_TRANSLATIONS, ())


def _policies(config: RunConfig) -> Iterator[str]:
    if config.actor.proximal == "bypass":
        yield "policies: behaviour (sampled the tokens) and current; 1 forward a token, in the update"
    else:
        yield (
            "policies: behaviour (sampled the tokens), proximal (weights at the start of the training step) and "
            "current; 2 forwards a token, one for the proximal log-probs and one in the update"
        )


def _correction(config: RunConfig) -> str:
    correction, bypass = config.algorithm.rollout_correction, config.actor.proximal == "bypass"
    if bypass and correction.loss_type == "ppo_clip":
        weight = "no weight, the clipped ratio is current / behaviour"
    elif correction.rollout_is is None:
        weight = "no weight (algorithm.rollout_correction.rollout_is: null)"
    else:
        ratio = "current / behaviour" if bypass else "proximal / behaviour"
        weight = f"{correction.rollout_is} weight {ratio}, {_bound(correction)}"
    rejection = f"; rejection by {', '.join(correction.rollout_rs)}" if correction.rollout_rs else ""
    return f"correction: {weight}{rejection}"


def _bound(correction: RolloutCorrectionConfig) -> str:
    lower, upper = correction.weight_bounds()
    return f"truncated at {upper:g}" if lower is None else f"0 outside [{lower:g}, {upper:g}]"


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
    if config.actor.proximal != "recompute" or config.async_training.require_batches > 1:
        return
    weighted = config.algorithm.rollout_correction.rollout_is is not None
    yield (
        "warning: actor.proximal = recompute with async_training.require_batches = 1 makes current / proximal "
        "exactly 1, so clipping (actor.clip_ratio_low, actor.clip_ratio_high) never acts; "
        f"{'only the correction weight does' if weighted else 'nothing accounts for stale tokens'}. To clip, set "
        "async_training.require_batches to 2 or more (with a smaller actor.ppo_mini_batch_size for the same "
        "batch), or actor.proximal to bypass"
    )
