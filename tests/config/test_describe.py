"""A configuration can be explained, dumped and loaded back, and given to an editor as JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import (
    ConfigError,
    config_notes,
    dump_yaml,
    explain,
    json_schema,
    known_keys,
    load_config,
    update_path,
)
from agentrl.config.keys import describe_type, keys
from agentrl.config.yaml_text import parse_yaml

DATA = {"data": {"train": "t.jsonl"}}


@pytest.mark.parametrize("key", known_keys())
def test_every_key_has_an_explanation(key: str) -> None:
    assert keys()[key].doc, "a docstring"
    text = explain(key)
    assert text.startswith(key)
    assert keys()[key].doc in " ".join(text.split())


def test_a_field_is_explained_with_type_and_default() -> None:
    text = explain("rollout.max_head_offpolicyness")
    assert "type     integer, at least 0, or null" in text
    assert "default  null" in text
    assert "A hard bound, checked when" in " ".join(text.split())


def test_a_section_is_explained_by_its_keys() -> None:
    text = explain("actor.optim")
    assert "lr_warmup_steps" in text and "1.0e-06" in text and "[0.9, 0.95]" in text


def test_without_a_key_all_sections_are_listed() -> None:
    assert all(section in explain() for section in ("model", "data", "rollout", "async_training", "val"))


def test_explaining_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean rollout\.max_concurrent\?"):
        explain("actor.max_concurent")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "integer or null"),
        (tuple[float, ...], "list of number"),
        (tuple[float, float], "[number, number]"),
        (dict[str, Any], "mapping with text keys"),
        (bool | str, "true or false or text"),
    ],
)
def test_types_are_put_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["extends=[hardware/cpu, modes/async_stale]", "actor.optim.lr=1e-6"],
        ["algorithm.adv_estimator=rloo", "env.cls=a:B", "env.args={x: '1e-6', y: 1e-6, z: [on, 'on', 2024-01-01]}"],
        ["actor.proximal=bypass"],
        [
            "actor.proximal=bypass",
            "algorithm.rollout_correction={loss_type: reinforce, rollout_is_threshold: [0.5, 5]}",
        ],
        ["algorithm.rollout_correction={rollout_is: null, rollout_rs: 'seq_mean_k1', rollout_rs_threshold: '0.5_2.0'}"],
        ["data.val=m:f", "data.val_args={a: 'naïve: #1'}", "val.limit=3", "trainer.total_steps=10"],
        ["data.train=m:f", "data.train_args={levels: [1, 2], names: {x: null}}"],
    ],
)
def test_a_dumped_configuration_loads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(DATA, overrides)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)


def test_a_dump_holds_every_key_that_has_an_effect() -> None:
    config = load_config({"data": {"train": "t.jsonl", "val": "v.jsonl"}}, ["env.cls=a:B"])
    dumped = parse_yaml(dump_yaml(config)).value
    left_out = [key for key in known_keys() if ".NAME" not in key and not _holds(dumped, key)]
    sections = ("algorithm.kl_ctrl", "algorithm.reward_norm.", "algorithm.adv_norm.", "critic")
    assert [key for key in left_out if not key.startswith(sections)] == [
        "model.lora_alpha",
        "model.target_modules",
        "model.lora_merge",
        "data.train_args",
        "data.val_args",
        "data.sampler_args",
        "environments",
        "rollout.engine_urls",
        "rollout.engine_args",
        "rollout.tensor_parallel_size",
        "gateway.idle_timeout",
        "algorithm.gae_timestep",
        "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_weights",
        "algorithm.overlong_penalty_factor",
        "algorithm.kl_penalty",
        "algorithm.rollout_correction.loss_type",
        "actor.loss_scale_factor",
        "actor.tau_pos",
        "actor.tau_neg",
        "actor.clip_cov_ratio",
        "actor.clip_cov_lb",
        "actor.clip_cov_ub",
        "actor.kl_cov_ratio",
        "actor.ppo_kl_coef",
        "actor.dro_beta",
        "actor.kl_loss_coef",
        "actor.kl_loss_type",
        "actor.optim.min_lr_ratio",
        "weights.directory",
        "weights.host",
        "trainer.critic_warmup",
    ]


def _holds(values: Any, key: str) -> bool:
    for part in key.split("."):
        if values is None or part not in values:
            return False
        values = values[part]
    return True


def test_the_json_schema_describes_fields_and_extends() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert "extends" in schema["properties"]
    assert schema["$defs"]["RolloutConfig"]["properties"]["n"]["description"].startswith("Episodes of each task")
    assert schema["additionalProperties"] is False


class TestNotes:
    def test_one_optimiser_step_from_the_anchor_warns_and_names_the_remedy(self) -> None:
        [warning] = _warnings()
        assert "clipping" in warning
        assert "async_training.require_batches to 2" in warning and "actor.proximal to bypass" in warning
        assert "only the correction weight" in warning

    def test_without_a_weight_the_warning_says_that_nothing_corrects(self) -> None:
        [warning] = _warnings("algorithm.rollout_correction.rollout_is=null")
        assert "nothing accounts for stale tokens" in warning

    @pytest.mark.parametrize(
        ("keys", "idle"),
        [
            (["actor.loss_mode=sapo", "actor.loss_agg_mode=seq-mean-token-mean"], "actor.tau_pos"),
            (["actor.loss_mode=dro", "actor.dro_beta=0.1"], "actor.dro_beta"),
            (["actor.loss_mode=kl_cov"], "actor.ppo_kl_coef"),
        ],
    )
    def test_other_terms_that_never_act_are_named(self, keys: list[str], idle: str) -> None:
        assert any(idle in warning and "never acts" in warning for warning in _warnings(*keys))
        assert not any(idle in warning for warning in _warnings(*keys, "async_training.require_batches=2"))

    @pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
    def test_losses_that_depend_on_the_split_say_so(self, mode: str) -> None:
        [warning] = _warnings(f"actor.loss_mode={mode}", "async_training.require_batches=2")
        assert "actor.ppo_max_token_len_per_gpu" in warning

    @pytest.mark.parametrize("remedy", ["async_training.require_batches=2", "actor.proximal=bypass"])
    def test_each_remedy_ends_the_warning(self, remedy: str) -> None:
        assert _warnings(remedy) == []

    @pytest.mark.parametrize(
        ("overrides", "policies", "correction"),
        [
            ([], "2 forwards a token", "token weight proximal / behaviour, truncated at 2"),
            (["actor.proximal=bypass"], "1 forward a token", "no weight, the ratio is current / behaviour"),
            (
                ["actor.proximal=bypass", "actor.loss_mode=dro", "actor.dro_beta=0.1"],
                "1 forward a token",
                "no weight (actor.proximal: bypass)",
            ),
            (
                ["actor.proximal=bypass", "algorithm.rollout_correction={loss_type: reinforce, rollout_is: sequence}"],
                "1 forward a token",
                "sequence weight current / behaviour",
            ),
            (
                ["algorithm.rollout_correction.rollout_is_threshold=[0.5, 5]"],
                "2 forwards a token",
                "0 outside [0.5, 5]",
            ),
            (
                ["algorithm.rollout_correction={rollout_rs: [token_k3], rollout_rs_threshold: [0.1]}"],
                "2 forwards a token",
                "rejected where token_k3 is above 0.1 nats",
            ),
        ],
    )
    def test_the_active_path_is_said(self, overrides: list[str], policies: str, correction: str) -> None:
        notes = config_notes(load_config(DATA, overrides))
        assert any(note.startswith("policies:") and policies in note for note in notes)
        assert any(note.startswith("correction:") and correction in note for note in notes)

    @pytest.mark.parametrize(
        ("overrides", "forwards"),
        [
            ([], ["proximal log-probs", "the update"]),
            (["actor.proximal=bypass"], ["the update"]),
            (["actor.proximal=loglinear"], ["the update"]),
            (["actor.use_kl_loss=true"], ["proximal log-probs", "reference log-probs", "the update"]),
            (["actor.proximal=bypass", "algorithm.use_kl_in_reward=true"], ["reference log-probs", "the update"]),
            (["algorithm.adv_estimator=gae"], ["proximal log-probs", "values", "the critic's update", "the update"]),
        ],
    )
    def test_the_forwards_of_a_step_are_counted(self, overrides: list[str], forwards: list[str]) -> None:
        path = update_path(load_config(DATA, overrides))
        assert path["forwards"] == dict.fromkeys(forwards, 1)
        reference = path["policies"].get("reference")
        assert (reference == "untrained") is ("reference log-probs" in forwards)

    def test_with_adapters_the_reference_is_the_policy_without_them(self) -> None:
        path = update_path(load_config(DATA, ["actor.use_kl_loss=true", "model.lora_rank=8"]))
        assert "adapters" in path["policies"]["reference"]

    def test_the_loss_is_said(self) -> None:
        keys = ["actor.use_kl_loss=true", "actor.entropy_coeff=0.01", "actor.loss_mode=cispo"]
        [line] = [note for note in config_notes(load_config(DATA, keys)) if note.startswith("loss:")]
        assert line == "loss: cispo + 0.001 KL (low_var_kl) + entropy bonus 0.01, token-mean, advantages by grpo"

    def test_the_staleness_line_counts_exactly(self) -> None:
        notes = config_notes(
            load_config(DATA, ["actor.ppo_mini_batch_size=100", "async_training.staleness_threshold=0.15"])
        )
        assert any("at most 115 groups admitted" in note for note in notes)

    def test_defaults_that_end_a_run_early_are_said(self) -> None:
        notes = config_notes(load_config(DATA))
        assert any("1 pass over the training tasks" in note for note in notes)
        assert any(note.startswith("validation: none") for note in notes)


def _warnings(*overrides: str) -> list[str]:
    notes = config_notes(load_config(DATA, overrides))
    return [note for note in notes if note.startswith("warning:")]
