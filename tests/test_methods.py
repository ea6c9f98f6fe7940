"""Methods beside the demo's own, in whole runs: real processes, real updates. A minute each, or less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from agentrl import RunResult, train
from agentrl.tiny import tiny_model_path

pytestmark = pytest.mark.full

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"
PLUGINS = """
from agentrl.algorithm import mean_pair


def centred(inputs):
    group = inputs.groups()
    advantages = inputs.spread(group.score - group.mean)
    return advantages, advantages


def plain(inputs):
    return -inputs.advantages * inputs.logp, {"actor/mine": mean_pair(inputs.advantages, inputs.kept)}
"""


def run(folder: Path, *overrides: str) -> tuple[RunResult, list[dict[str, Any]]]:
    log = (folder / "log").open("w")
    defaults = ("trainer.total_steps=4", "val.limit=32", f"trainer.output_dir={folder}")
    result = train(CONFIG, [*defaults, *overrides], console=Console(file=log))
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]
    assert sum(result.fates.values()) == result.dispatched
    assert not rows[-1]["actor/skipped_steps"]
    return result, rows


def recorded(result: RunResult) -> dict[str, Any]:
    return json.loads((result.run_dir / "environment.json").read_text())["update"]


def test_adapters_learn_beside_a_reference_that_needs_no_copy(tmp_path: Path) -> None:
    result, rows = run(
        tmp_path,
        *("trainer.total_steps=20", "val.limit=256", "model.lora_rank=16", "model.lora_alpha=32"),
        *("actor.optim.lr=0.0015", "actor.use_kl_loss=true"),
    )
    assert result.accuracy_before is not None and result.accuracy_after is not None
    assert result.accuracy_after > result.accuracy_before + 0.3
    assert rows[-1]["actor/kl_loss"] > rows[0]["actor/kl_loss"]
    merged, base = (
        load_file(result.run_dir / "model/model.safetensors"),
        load_file(tiny_model_path() / "model.safetensors"),
    )
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name].to(merged[name].dtype))}
    assert changed and all("_proj" in name for name in changed)
    assert (result.run_dir / "adapter/adapter_config.json").is_file()
    assert recorded(result)["forwards"] == {"proximal log-probs": 1, "reference log-probs": 1, "the update": 1}


def test_a_critic_learns_with_the_policy(tmp_path: Path) -> None:
    result, rows = run(
        tmp_path,
        *("trainer.total_steps=12", "algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gae_timestep=turn"),
        *("critic.optim.lr=0.001", "trainer.critic_warmup=0"),
    )
    assert rows[-1]["critic/error"] < rows[0]["critic/error"]
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
    assert recorded(result)["policies"].keys() == {"behaviour", "proximal", "current"}


def test_greedy_baselines_are_played_for_each_group(tmp_path: Path) -> None:
    result, rows = run(tmp_path, "algorithm.adv_estimator=remax", "rollout.n=4")
    fates = [json.loads(line) for line in (result.run_dir / "fates.jsonl").read_text().splitlines()]
    trained = {fate["group_id"] for fate in fates if fate["fate"] == "trained"}
    greedy = {fate["group_id"] for fate in fates if fate["reason"] == "greedy, the baseline of its group"}
    assert trained and trained <= greedy
    assert all(row["episode/count"] == 64 for row in rows)


def test_a_loss_and_an_estimator_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "methods_of_mine.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    keys = ("algorithm.adv_estimator=methods_of_mine:centred", "actor.loss_mode=methods_of_mine:plain")
    result, rows = run(tmp_path, *keys)
    assert all("actor/mine" in row for row in rows)
    assert recorded(result)["loss"] == "methods_of_mine:plain, token-mean, advantages by methods_of_mine:centred"


@pytest.mark.parametrize(
    "keys",
    [
        ("actor.proximal=loglinear", "async_training.trigger_parameter_sync_step=2", "actor.prox_anchor=publish"),
        ("async_training.trigger_parameter_sync_step=2", "actor.prox_anchor=publish"),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", "algorithm.rollout_correction.m2_threshold=0.04"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=true", "actor.entropy_coeff=0.001"),
        ("actor.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean", "algorithm.branch_weighting=branch"),
    ],
    ids=lambda keys: keys[0].split("=")[-1],
)
def test_it_runs(keys: tuple[str, ...], tmp_path: Path) -> None:
    _, rows = run(tmp_path, *keys)
    assert len(rows) == 4
