"""`RolloutCorrectionConfig`: verl's names, presets and threshold notation, in one canonical form."""

import math
import subprocess
import sys
import warnings

import pytest
from pydantic import ValidationError

from agentrl.config.correction import PRESETS, BoundSemanticsWarning, RolloutCorrectionConfig

BYPASS_PRESETS = {name for name in PRESETS if name.startswith("bypass")}


def config(**fields) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(fields)


def test_the_default_is_token_level_truncation_at_two():
    assert (config().rollout_is, config().rollout_is_threshold, config().rollout_rs) == ("token", 2.0, None)


def test_there_are_nineteen_presets():
    assert len(PRESETS) == 19


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    preset = RolloutCorrectionConfig.preset(name)
    assert RolloutCorrectionConfig.model_validate(preset.model_dump()) == preset
    assert RolloutCorrectionConfig.model_validate_json(preset.model_dump_json()) == preset
    assert preset.bypass_mode == (name in BYPASS_PRESETS)
    assert (preset.loss_type == "reinforce") == name.startswith("bypass_pg")


def test_a_preset_is_what_its_name_says():
    preset = RolloutCorrectionConfig.preset("decoupled_geo_rs_seq_tis")
    assert (preset.rollout_is, preset.rollout_is_threshold) == ("sequence", 2.0)
    assert (preset.rollout_rs, preset.rollout_rs_threshold) == (("seq_mean_k1",), ((0.999, 1.001),))
    with pytest.raises(ValueError, match=r"preset 'geo_rs'.*decoupled_geo_rs"):
        RolloutCorrectionConfig.preset("geo_rs")


@pytest.mark.parametrize("threshold", ["0.5_5.0", [0.5, 5.0], (0.5, 5.0)])
def test_a_band_may_be_written_in_any_of_these_ways(threshold):
    assert config(rollout_is_threshold=threshold).weight_bounds() == (0.5, 5.0)
    assert config(rollout_is_threshold="3").weight_bounds() == (None, 3.0)


@pytest.mark.parametrize(
    ("statistics", "threshold", "expected"),
    [
        ("token_k1", "0.5_2.0", [("token_k1", 0.5, 2.0)]),
        ("token_k1", [0.5, 2.0], [("token_k1", 0.5, 2.0)]),
        ("token_k1", 2.0, [("token_k1", 0.5, 2.0)]),
        (["token_k1", "seq_max_k3"], "0.5_2.0, 0.1", [("token_k1", 0.5, 2.0), ("seq_max_k3", None, 0.1)]),
        (["token_k1", "seq_max_k3"], [[0.5, 2.0], 0.1], [("token_k1", 0.5, 2.0), ("seq_max_k3", None, 0.1)]),
        ("seq_sum_k2,seq_sum_k3,seq_sum_k2", 0.1, [("seq_sum_k2", None, 0.1), ("seq_sum_k3", None, 0.1)]),
    ],
)
def test_rejection_bounds_in_nats(statistics, threshold, expected):
    bounds = config(rollout_rs=statistics, rollout_rs_threshold=threshold).rejection_bounds()
    for (name, lower, upper), (expected_name, low, high) in zip(bounds, expected, strict=True):
        assert name == expected_name
        if low is None:
            assert (lower, upper) == (-math.inf, high)
        else:
            assert (lower, upper) == pytest.approx((math.log(low), math.log(high)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_iss": "token"}, "rollout_iss"),
        ({"rollout_is": "group"}, "'token' or 'sequence'"),
        ({"rollout_is_threshold": "2.0_"}, "write a number"),
        ({"rollout_is_threshold": True}, "write a number"),
        ({"rollout_is_threshold": [5.0, 0.5]}, "lower before upper"),
        ({"rollout_is_threshold": 0}, "positive"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "seq_max_k2"),
        ({"rollout_rs": 5, "rollout_rs_threshold": 2.0}, "rollout_rs"),
        ({"rollout_rs": "token_k1"}, "0 bounds"),
        ({"rollout_rs_threshold": 2.0}, "names 0 statistics"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "one upper bound"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": [1, 2, 3]}, "one bound per statistic"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, "set rollout_is"),
        ({"loss_type": "ppo"}, "ppo_clip"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, r"\[2, 0.5\], which leaves out a ratio of 1"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2,3"}, r"\[2, 3\], which leaves out a ratio of 1"),
        ({"rollout_is_threshold": [2, 3]}, r"rollout_is_threshold is \[2, 3\], which leaves out a ratio of 1"),
        ({"m2_threshold": -1}, "greater than 0"),
        ({"m2_threshold": math.inf}, "finite"),
        ({"m2_threshold": math.nan}, "greater than 0|finite"),
        ({"rollout_is_threshold": math.nan}, "finite"),
    ],
)
def test_errors_say_what_to_write(fields, message):
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_an_asymmetric_band_in_verl_notation_warns_that_bounds_are_on_r():
    with pytest.warns(BoundSemanticsWarning, match=r"1 / r in verl.*\[0\.2, 2\]"):
        config(rollout_rs="token_k1", rollout_rs_threshold="0.5_5.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
        config(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")
        config(rollout_rs="token_k1", rollout_rs_threshold=[0.5, 5.0])
        config(rollout_is_threshold="0.5_5.0")


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        config().rollout_is = None


def test_every_field_is_described():
    assert all(field.description for field in RolloutCorrectionConfig.model_fields.values())


def test_the_config_loads_without_torch():
    code = "import sys, agentrl.config.correction; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
