"""`algorithm.rollout_correction`: how the gap between the sampling and the training policy is corrected.

The names are verl's (0.9.1), so that a config carries over. One thing differs: the bounds of a k1 statistic
are bounds on r = training / rollout probability, where verl applies them to 1 / r.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Band = tuple[float, float]

RejectionStatistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


class BoundSemanticsWarning(UserWarning):
    """A k1 band in verl's notation, not symmetric around 1, selects other tokens here than in verl."""


def _parse_bound(value: Any) -> Any:
    """One threshold in verl's notation to a number or a pair: "2.0" to 2.0, "0.5_5.0" to (0.5, 5.0)."""
    if isinstance(value, bool):
        raise ValueError(f"threshold {value}: write a number such as 2.0, or a band such as [0.5, 5.0]")
    if not isinstance(value, str):
        return value
    try:
        numbers = [float(part) for part in value.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"threshold {value!r}: write a number such as 2.0, or a band such as [0.5, 5.0]")
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _split_names(value: Any) -> Any:
    """The names in "token_k1, seq_mean_k3" or in a list, without duplicates; None where there are none."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        return value
    return list(dict.fromkeys(name for name in names if name != "")) or None


class RolloutCorrectionConfig(BaseModel):
    """Importance weights and rejection between the behaviour policy and the policy that anchors the update.

    With l = log-prob under the anchor (under bypass: the current policy) minus the recorded rollout log-prob,
    r = exp(l). Source: Liu et al., "When Speed Kills Stability", 2025; IcePop: Ling team, 2025.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rollout_is: Literal["token", "sequence"] | None = Field(
        default="token",
        description="Level of the importance weight: `token` weighs each token by its own r (low variance, "
        "biased), `sequence` by the product over its sequence (unbiased, high variance), null by nothing. "
        "Default token.",
    )
    rollout_is_threshold: Annotated[float | Band, BeforeValidator(_parse_bound)] = Field(
        default=2.0,
        description="Bound on the weight, a ratio. A number truncates above (TIS); a band [lo, hi] sets the "
        'weight to 0 outside (IcePop), without rejecting the token. verl\'s "0.5_5.0" is read as a band. '
        "Default 2.0.",
    )
    rollout_is_batch_normalize: bool = Field(
        default=False,
        description="Divide the weights by their mean, over tokens or sequences as `rollout_is` says, so that "
        "they average 1. Default false.",
    )
    rollout_rs: Annotated[tuple[RejectionStatistic, ...] | None, BeforeValidator(_split_names)] = Field(
        default=None,
        description="Statistics that a token or sequence must all keep within bounds, else it is left out of "
        "the loss (its denominators stay): {token,seq_sum,seq_mean}_{k1,k2,k3}, seq_max_{k2,k3}, with "
        "k1 = l, k2 = l^2/2, k3 = e^l - 1 - l. A list, or verl's comma-separated string. Default null: none.",
    )
    rollout_rs_threshold: tuple[float | Band, ...] | None = Field(
        default=None,
        description="One bound per statistic of `rollout_rs`, or one for all. k1: a band [lo, hi] on r, a "
        "number c meaning [1/c, c]. k2, k3: an upper bound in nats. verl's strings are read. Default null.",
    )
    m2_threshold: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="M2PO: leave out the tokens of largest l^2 until the mean l^2 of an optimiser step's others is "
        "below this, in nats^2; at least one stays. Default null: none.",
    )
    bypass_mode: bool = Field(
        default=False,
        description="verl's name for `actor.proximal`, and read as it: true is `bypass` (the recorded log-probs are "
        "the anchor and no extra forward is made), false `recompute`. Set by the bypass presets. Default false.",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        default="ppo_clip",
        description="Loss under bypass: `ppo_clip` clips current / rollout and takes no weight, `reinforce` "
        "is -w A log p with the weight above. Default ppo_clip.",
    )

    @classmethod
    def preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset `name` of verl 0.9.1.

        Raises:
            ValueError: no such preset; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown rollout correction preset {name!r}: use one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name])

    @field_validator("rollout_is_threshold")
    @classmethod
    def _check_weight_bound(cls, value: float | Band) -> float | Band:
        return _checked_band("rollout_is_threshold", _checked_bound("rollout_is_threshold", value))

    @model_validator(mode="before")
    @classmethod
    def _read_rejection_bounds(cls, data: Any) -> Any:
        """Brings `rollout_rs_threshold` into its one form: a bound per statistic, bands as pairs."""
        if not isinstance(data, dict) or data.get("rollout_rs_threshold") is None:
            return data
        given = data["rollout_rs_threshold"]
        names = _split_names(data.get("rollout_rs"))
        statistics = names if isinstance(names, list) else []
        bounds = _per_statistic(given, len(statistics))
        for name, bound in zip(statistics, bounds, strict=False):
            if str(name).endswith("k1") and isinstance(given, str):
                _warn_if_asymmetric(str(name), bound)
        return {**data, "rollout_rs_threshold": tuple(bounds)}

    @model_validator(mode="after")
    def _check_rejection(self) -> RolloutCorrectionConfig:
        statistics, bounds = self.rollout_rs or (), self.rollout_rs_threshold or ()
        if len(statistics) != len(bounds):
            raise ValueError(
                f"rollout_rs names {len(statistics)} statistics but rollout_rs_threshold has {len(bounds)} "
                "bounds: give one bound per statistic, or one for all"
            )
        for name, bound in zip(statistics, bounds, strict=True):
            _checked_bound(f"rollout_rs_threshold of {name}", bound)
            if isinstance(bound, tuple) and not name.endswith("k1"):
                raise ValueError(f"rollout_rs_threshold of {name} is {bound}: k2 and k3 take one upper bound")
            if name.endswith("k1"):
                _checked_band(f"rollout_rs_threshold of {name}", ratio_band(bound))
        if self.rollout_is is None and self.rollout_is_batch_normalize:
            raise ValueError("rollout_is_batch_normalize needs weights: set rollout_is to token or sequence")
        return self

    def rejection_bounds(self) -> tuple[tuple[RejectionStatistic, float, float], ...]:
        """(statistic, lowest, highest value kept) in the statistic's own unit, nats; lowest may be -inf."""
        return tuple(
            (name, *_in_nats(name, bound))
            for name, bound in zip(self.rollout_rs or (), self.rollout_rs_threshold or (), strict=True)
        )

    def weight_bounds(self) -> tuple[float | None, float]:
        """(lower, upper) bound of the weight, a ratio; lower None means truncation instead of a band."""
        bound = self.rollout_is_threshold
        return bound if isinstance(bound, tuple) else (None, bound)


def _per_statistic(given: Any, statistics: int) -> list[Any]:
    """Bounds as a list: splits strings, reads two numbers for one statistic as a band, repeats a single bound."""
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",") if part.strip()]
    entries: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    bounds = [_parse_bound(entry) for entry in entries]
    if statistics == 1 and len(bounds) == 2 and all(isinstance(bound, (int, float)) for bound in bounds):
        return [tuple(bounds)]
    return bounds * statistics if len(bounds) == 1 and statistics > 1 else bounds


def _checked_bound(key: str, bound: float | Band) -> float | Band:
    numbers = bound if isinstance(bound, tuple) else (bound,)
    if not all(number > 0 and math.isfinite(number) for number in numbers) or list(numbers) != sorted(numbers):
        raise ValueError(f"{key} is {bound}: bounds are positive and finite, lower before upper")
    return bound


def _checked_band(key: str, bound: float | Band) -> float | Band:
    """Policies that agree have a ratio of 1, and what they sampled is never to be left out."""
    if isinstance(bound, tuple) and not bound[0] <= 1 <= bound[1]:
        raise ValueError(
            f"{key} is [{bound[0]:g}, {bound[1]:g}], which leaves out a ratio of 1, so all tokens on which the "
            "policies agree: write a band around 1, such as [0.5, 2.0], or a number above 1"
        )
    return bound


def ratio_band(bound: float | Band) -> Band:
    """The lowest and highest ratio that a bound of a k1 statistic keeps; one number c is [1/c, c]."""
    return bound if isinstance(bound, tuple) else (1 / bound, bound)


def _in_nats(statistic: str, bound: float | Band) -> Band:
    if not statistic.endswith("k1"):
        return -math.inf, cast(float, bound)
    lower, upper = ratio_band(bound)
    return math.log(lower), math.log(upper)


def _warn_if_asymmetric(statistic: str, bound: Any) -> None:
    """A band with lo * hi = 1 means the same for r and 1 / r; 1% of its width is taken as rounding."""
    if not isinstance(bound, tuple) or min(bound) <= 0:
        return
    lower, upper = math.log(bound[0]), math.log(bound[1])
    if abs(lower + upper) > 0.01 * (upper - lower):
        warnings.warn(
            f"rollout_rs_threshold of {statistic}: [{bound[0]}, {bound[1]}] bounds r = training / rollout "
            f"probability here, and 1 / r in verl. For verl's selection write "
            f"[{1 / bound[1]:.6g}, {1 / bound[0]:.6g}].",
            BoundSemanticsWarning,
            stacklevel=2,
        )


_NO_WEIGHT = {"rollout_is": None}
_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": (0.5, 5.0)}
_SEQUENCE_RS = {"rollout_rs": ["seq_sum_k1"], "rollout_rs_threshold": [(0.5, 2.0)]}
_GEOMETRIC_RS = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [(0.999, 1.001)]}
_K3_RS = {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": [0.01]}
_BYPASS_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _NO_WEIGHT,
    "decoupled_token_is": _TOKEN_TIS,
    "decoupled_seq_is": _SEQUENCE_TIS,
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE_TIS | _SEQUENCE_RS,
    "decoupled_geo_rs": _NO_WEIGHT | _GEOMETRIC_RS,
    "decoupled_geo_rs_token_tis": _TOKEN_TIS | _GEOMETRIC_RS,
    "decoupled_geo_rs_seq_tis": _SEQUENCE_TIS | _GEOMETRIC_RS,
    "decoupled_k3_rs": _NO_WEIGHT | _K3_RS,
    "decoupled_k3_rs_token_tis": _TOKEN_TIS | _K3_RS,
    "decoupled_k3_rs_seq_tis": _SEQUENCE_TIS | _K3_RS,
    "bypass_ppo_clip": _NO_WEIGHT | _BYPASS_PPO,
    "bypass_ppo_clip_geo_rs": _NO_WEIGHT | _GEOMETRIC_RS | _BYPASS_PPO,
    "bypass_ppo_clip_k3_rs": _NO_WEIGHT | _K3_RS | _BYPASS_PPO,
    "bypass_pg_is": _SEQUENCE_TIS | _BYPASS_REINFORCE,
    "bypass_pg_token_icepop": _TOKEN_ICEPOP | _BYPASS_REINFORCE,
    "bypass_pg_geo_rs": _NO_WEIGHT | _GEOMETRIC_RS | _BYPASS_REINFORCE,
    "bypass_pg_geo_rs_token_tis": _TOKEN_TIS | _GEOMETRIC_RS | _BYPASS_REINFORCE,
    "bypass_pg_geo_rs_seq_tis": _SEQUENCE_TIS | _GEOMETRIC_RS | _BYPASS_REINFORCE,
}
"""The presets of verl 0.9.1 with its default thresholds."""
