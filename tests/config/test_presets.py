"""What is shipped loads: every preset, and every example."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RolloutCorrectionConfig, RunConfig, load_config, preset_names
from agentrl.config.correction import PRESETS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))


def preset(name: str) -> RunConfig:
    return load_config({"extends": name, "data": {"train": "t.jsonl"}})


def test_the_presets_are_those_of_the_folder_configs() -> None:
    files = (ROOT / "configs").glob("*/*.yaml")
    assert preset_names() == sorted(path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in files)
    assert {"hardware/cpu", "modes/on_policy", "modes/async_stale", "modes/async_partial"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is_for(name: str) -> None:
    preset(name)
    assert (ROOT / "configs" / f"{name}.yaml").read_text().startswith("# ")


def test_the_modes_are_those_of_their_names() -> None:
    on_policy, stale, partial = map(preset, ("modes/on_policy", "modes/async_stale", "modes/async_partial"))
    assert (on_policy.eta, on_policy.max_lag) == (0, 0)
    assert stale.eta > 0 and not stale.async_training.partial_rollout
    assert partial.eta > 0 and partial.async_training.partial_rollout
    assert preset("hardware/cpu").trainer.device == "cpu"


def test_raising_the_threshold_of_a_mode_raises_its_bound() -> None:
    config = load_config(
        {"extends": "modes/async_partial", "data": {"train": "t"}}, ["async_training.staleness_threshold=2.5"]
    )
    assert config.max_lag == 3


@pytest.mark.parametrize("name", PRESETS)
def test_the_corrections_are_verls(name: str) -> None:
    config = preset(f"correction/{name}")
    expected = RolloutCorrectionConfig.preset(name)
    assert config.actor.proximal == ("bypass" if expected.bypass_mode else "recompute")
    assert config.algorithm.rollout_correction == expected.model_copy(update={"bypass_mode": False})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_loads(path: Path) -> None:
    load_config(path)
