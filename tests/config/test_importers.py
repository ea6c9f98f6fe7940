"""verl's and AReaL's key names: each is read, refused with the reason, or found to contradict another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import ConfigError, Problem, RunConfig, config_notes, dump_yaml, explain, load_config
from agentrl.config.foreign import NOT_GIVEN, Absent, Fixed, Renamed, foreign_keys
from agentrl.config.foreign_groups import GROUPS
from agentrl.config.keys import keys
from agentrl.config.tree import at, put

TASKS = {"data": {"train": "t.jsonl"}}

VALUES: dict[str, Any] = {
    "model.path": "models/mine",
    "model.dtype": "bfloat16",
    "data.train": "other.jsonl",
    "data.val": "held_out.jsonl",
    "data.train_args": {"split": "train"},
    "data.val_args": {"split": "test"},
    "data.train_args.split": "train",
    "data.val_args.split": "test",
    "data.shuffle": False,
    "rollout.engine": "torch",
    "rollout.stop": ["</answer>"],
    "rollout.filter_zero_variance": False,
    "actor.loss_mode": "vanilla",
    "actor.loss_agg_mode": "seq-mean-token-sum-norm",
    "actor.optim.lr_scheduler_type": "linear",
    "actor.optim.min_lr_ratio": 0.1,
    "actor.optim.betas": [0.8, 0.9],
    "trainer.experiment_name": "mine",
    "trainer.output_dir": "elsewhere",
    "trainer.val_before_train": False,
    "val.top_p": 0.7,
    "rollout.top_p": 1.0,
    "rollout.top_k": -1,
    "rollout.max_model_len": 3000,
    "actor.clip_ratio_c": 5.0,
    "val.temperature": 0.5,
    "model.target_modules": ["q_proj"],
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    "algorithm.gae_timestep": "turn",
    "algorithm.gdpo_reward_keys": ["a"],
    "algorithm.gdpo_reward_weights": [1.0],
    "algorithm.adv_estimator": "rloo",
    "actor.use_kl_loss": True,
    "actor.kl_loss_type": "k2",
    "critic.path": "models/critic",
    "critic.optim.lr_scheduler_type": "linear",
    "critic.optim.min_lr_ratio": 0.1,
}
"""A value for each key of the tables that the number 3 would not suit."""

FOREIGN_VALUES: dict[str, Any] = {
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    "eval_gconfig.greedy": True,
    "algorithm.rollout_correction.bypass_mode": True,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": ["console", "tensorboard"],
    "algorithm.adv_estimator": "rloo_vectorized",
}
"""Values of foreign keys that mean another here."""

GAE_KEYS = (
    *("algorithm.lam", "algorithm.gamma", "algorithm.gae_timestep"),
    *("critic.path", "critic.grad_clip", "critic.cliprange_value"),
    *(f"critic.optim.{name}" for name in ("lr", "weight_decay", "lr_warmup_steps")),
)

AROUND: dict[str, dict[str, Any]] = {
    "actor.loss_scale_factor": {"actor": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    "actor.loss_mode": {"actor": {"loss_agg_mode": "seq-mean-token-mean"}},
    "actor.tau_pos": {"actor": {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"}},
    "actor.tau_neg": {"actor": {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"}},
    **{f"actor.clip_cov_{name}": {"actor": {"loss_mode": "clip_cov"}} for name in ("ratio", "lb", "ub")},
    "actor.kl_cov_ratio": {"actor": {"loss_mode": "kl_cov"}},
    "actor.ppo_kl_coef": {"actor": {"loss_mode": "kl_cov"}},
    "actor.dro_beta": {"actor": {"loss_mode": "dro"}},
    "actor.kl_loss_coef": {"actor": {"use_kl_loss": True}},
    "actor.kl_loss_type": {"actor": {"use_kl_loss": True}},
    "model.lora_alpha": {"model": {"lora_rank": 4}},
    "model.target_modules": {"model": {"lora_rank": 4}},
    **{key: {"algorithm": {"adv_estimator": "gae"}} for key in GAE_KEYS},
    "critic.optim.lr_scheduler_type": {"algorithm": {"adv_estimator": "gae"}, "trainer": {"total_steps": 9}},
    "critic.optim.min_lr_ratio": {
        "algorithm": {"adv_estimator": "gae"},
        "trainer": {"total_steps": 9},
        "critic": {"optim": {"lr_scheduler_type": "cosine"}},
    },
    "data.train_args": {"data": {"train": "owner/name"}},
    "data.val_args": {"data": {"train": "t.jsonl", "val": "owner/name"}},
    "data.train_args.split": {"data": {"train": "owner/name"}},
    "data.val_args.split": {"data": {"train": "t.jsonl", "val": "owner/name"}},
    "actor.optim.lr_scheduler_type": {"trainer": {"total_steps": 9}},
    "actor.optim.min_lr_ratio": {"trainer": {"total_steps": 9}, "actor": {"optim": {"lr_scheduler_type": "cosine"}}},
}
"""What else must be given for a key to have an effect."""


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        assert put(values, name, value)
    return values


def refused(source: Any, overrides: Sequence[str] = ()) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    [problem] = caught.value.problems
    return problem


def translations(config: RunConfig) -> list[str]:
    return [note for note in config_notes(config) if note.startswith("translated: ")]


RENAMED = [key.row for key in foreign_keys().values() if isinstance(key.row, Renamed)]
TRANSLATED = [row for row in RENAMED if not row.shared or row.name in FOREIGN_VALUES]
"""The others are agentrl's own names, which take verl's way to say nothing too."""
FIXED = [key.row for key in foreign_keys().values() if isinstance(key.row, Fixed)]
ABSENT = [key.row for key in foreign_keys().values() if isinstance(key.row, Absent)]


class TestTables:
    """Every row does what it says."""

    def test_names_are_not_agentrls_unless_a_row_says_so(self) -> None:
        for name, key in foreign_keys().items():
            known = name in keys() and keys()[name].section is None
            assert known == (isinstance(key.row, Renamed) and key.row.shared), name
        assert not {name for group in GROUPS for name in group.names} & {*keys(), *foreign_keys()}

    def test_a_name_stands_in_one_table(self) -> None:
        from agentrl.config.areal_names import AREAL
        from agentrl.config.verl_names import VERL

        names = [row.name for row in (*VERL, *AREAL)]
        assert len(names) == len(set(names))

    @pytest.mark.parametrize("row", TRANSLATED, ids=lambda row: row.name)
    def test_a_renamed_key_sets_what_it_names(self, row: Renamed) -> None:
        for key in row.keys:
            assert key in keys() or key.rpartition(".")[0] in keys(), key
            source = {**TASKS, "data": {"train": "t.jsonl", "val": "v.jsonl"}}
            source |= AROUND.get(key, {})
            written = FOREIGN_VALUES.get(row.name, VALUES.get(key, 3))
            meant = row.convert(written) if row.convert else written
            meant = at(RunConfig().model_dump(), key) if meant is NOT_GIVEN else meant
            source = _over(source, nested((row.name, written)))
            if key in ("data.train", "data.val"):
                source["data"].pop(key.removeprefix("data."), None)
            config = load_config(source)
            found = at(config.model_dump(), key)
            assert (list(found) if isinstance(found, tuple) else found) == meant
            assert any(f"{row.name}" in note and key in note for note in translations(config))

    @pytest.mark.parametrize("row", [r for r in RENAMED if "_args" not in r.keys[0]], ids=lambda row: row.name)
    def test_its_problems_name_the_line_and_the_word_that_was_written(self, row: Renamed, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        *sections, leaf = row.name.split(".")
        lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate([*sections, leaf])]
        lines[-1] += " {nonsense: [1]}"
        data = "" if row.name.startswith("data.") else "data: {train: t.jsonl}\n"
        path.write_text(data + "\n".join(lines) + "\n")
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        names = (row.name, *row.keys, *(f"{key}.nonsense" for key in row.keys))
        found = next(problem for problem in caught.value.problems if problem.key in names)
        assert f"run.yaml, line {len(lines) + bool(data)}" in found.origin

    @pytest.mark.parametrize("row", FIXED, ids=lambda row: row.name)
    def test_a_fixed_key_takes_its_values_and_no_other(self, row: Fixed) -> None:
        for value in row.values:
            assert translations(load_config(_over(TASKS, nested((row.name, value))))) == []
        problem = refused(_over(TASKS, nested((row.name, "something else"))))
        assert problem.key == row.name
        assert "has no counterpart" in problem.reason and row.why in problem.reason

    @pytest.mark.parametrize("row", ABSENT, ids=lambda row: row.name)
    @pytest.mark.parametrize("value", [1, {"a": 1, "b": {"c": 2}}], ids=["key", "section"])
    def test_a_key_without_a_counterpart_is_refused_with_the_reason(self, row: Absent, value: Any) -> None:
        problem = refused(_over(TASKS, nested((row.name, value))))
        assert (problem.key, problem.fix) == (row.name, "remove it")
        assert problem.reason.endswith(f"has no counterpart: {row.why}")

    @pytest.mark.parametrize("name", [*foreign_keys(), *(name for group in GROUPS for name in group.names)])
    def test_every_name_can_be_explained(self, name: str) -> None:
        assert name in explain(name)

    def test_reasons_and_meanings_name_keys_that_exist(self) -> None:
        import re

        sections = "|".join({name.partition(".")[0] for name in keys()})
        texts = [row.why for row in (*FIXED, *ABSENT)] + [group.meaning for group in GROUPS]
        for text in texts:
            for name in re.findall(rf"\b(?:{sections})\.[a-z_]+(?:\.[a-z_]+)*", text):
                assert name in keys() or name in foreign_keys(), (name, text)


def _over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


VERL_FILE = """\
data:
  train_files: [train.parquet]
  val_files: test.parquet
  train_batch_size: 64
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  hybrid_engine: false
  model: {path: models/mine, use_remove_padding: true}
  rollout:
    name: torch
    mode: async
    n: 4
    temperature: 0.9
    top_p: 1.0
    top_k: -1
    calculate_log_probs: true
    val_kwargs: {do_sample: true, temperature: 0.6, top_p: 0.7, n: 2}
  actor:
    ppo_mini_batch_size: 16
    ppo_epochs: 1
    use_kl_loss: false
    entropy_coeff: 0
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: token-mean
    grad_clip: 1.0
    optim: {lr: 1e-6, weight_decay: 0.1, lr_warmup_steps: 10}
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: false
  rollout_correction: {bypass_mode: true}
trainer:
  total_training_steps: 100
  n_gpus_per_node: 1
  nnodes: 1
  save_freq: -1
  test_freq: 10
  logger: [console, tensorboard]
  experiment_name: mine
async_training: {staleness_threshold: 0.5, trigger_parameter_sync_step: 2, partial_rollout: true}
"""

VERL_NATIVE = """\
model: {path: models/mine}
data: {train: train.parquet, val: test.parquet, max_prompt_length: 512, max_response_length: 1024}
rollout: {engine: torch, n: 4, temperature: 0.9, top_p: 1.0, top_k: -1}
val: {temperature: 0.6, top_p: 0.7, n: 2}
actor:
  proximal: bypass
  ppo_mini_batch_size: 16
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28
  clip_ratio_c: 10.0
  loss_agg_mode: token-mean
  grad_clip: 1.0
  optim: {lr: 1e-6, weight_decay: 0.1, lr_warmup_steps: 10}
algorithm: {adv_estimator: grpo}
trainer: {total_steps: 100, save_freq: 0, test_freq: 10, logger: [tensorboard], experiment_name: mine}
async_training: {require_batches: 4, staleness_threshold: 0.5, trigger_parameter_sync_step: 2, partial_rollout: true}
"""

AREAL_FILE = """\
experiment_name: gsm8k-grpo
seed: 1
total_train_epochs: 10
async_training: true
cluster: {n_nodes: 1, fileroot: experiments}
rollout:
  max_concurrent_rollouts: 64
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, max_tokens: 2048, greedy: false, temperature: 1.0}
actor:
  path: Qwen/Qwen2.5-1.5B-Instruct
  dtype: bfloat16
  disable_dropout: true
  group_size: ${gconfig.n_samples}
  temperature: ${gconfig.temperature}
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta1: 0.9, beta2: 0.999, eps: 1e-8, lr_scheduler_type: constant,
     gradient_clipping: 1.0}
  eps_clip: 0.4
  kl_ctl: 0.0
  ppo_n_minibatches: 4
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
train_dataset: {batch_size: 256, shuffle: true, path: train.jsonl, type: rl, max_length: 1024}
valid_dataset: {path: test.jsonl, type: rl}
evaluator: {freq_epochs: null, freq_steps: 5}
"""

AREAL_NATIVE = """\
model: {path: Qwen/Qwen2.5-1.5B-Instruct, dtype: bfloat16}
data: {train: train.jsonl, val: test.jsonl, shuffle: true, seed: 1, max_prompt_length: 1024, max_response_length: 1024}
rollout: {n: 4, temperature: 1.0, max_model_len: 2048, max_concurrent: 256, max_head_offpolicyness: 2}
actor:
  proximal: recompute
  clip_ratio_low: 0.4
  clip_ratio_high: 0.4
  ppo_mini_batch_size: 64
  ppo_max_token_len_per_gpu: 10240
  grad_clip: 1.0
  optim: {lr: 1.7e-5, weight_decay: 0.017, betas: [0.9, 0.999], lr_scheduler_type: constant}
algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: [1e-9, 5.0]}}
async_training: {require_batches: 4}
trainer: {experiment_name: gsm8k-grpo, output_dir: experiments, total_epochs: 10, test_freq: 5}
"""


class TestFiles:
    @pytest.mark.parametrize(
        ("foreign", "native"), [(VERL_FILE, VERL_NATIVE), (AREAL_FILE, AREAL_NATIVE)], ids=["verl", "AReaL"]
    )
    def test_a_file_in_their_style_is_the_same_as_one_in_ours(self, foreign: str, native: str, tmp_path: Path) -> None:
        (tmp_path / "foreign.yaml").write_text(foreign)
        (tmp_path / "native.yaml").write_text(native)
        config = load_config(tmp_path / "foreign.yaml")
        assert config == load_config(tmp_path / "native.yaml")
        assert translations(config) and not translations(load_config(tmp_path / "native.yaml"))
        (tmp_path / "dumped.yaml").write_text(dump_yaml(config))
        again = load_config(tmp_path / "dumped.yaml")
        assert again == config and not translations(again)

    def test_a_file_may_extend_one_in_their_style_and_the_other_way_round(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("gconfig: {n_samples: 4}\ndata: {train: t.jsonl}\n")
        (tmp_path / "native.yaml").write_text("extends: base.yaml\nrollout: {n: 6}\n")
        config = load_config(tmp_path / "native.yaml")
        assert config.rollout.n == 6
        assert not translations(config), "what does not count in the end is not said"
        (tmp_path / "foreign.yaml").write_text("extends: native.yaml\ngconfig: {n_samples: 2}\n")
        assert load_config(tmp_path / "foreign.yaml").rollout.n == 2
        assert load_config(tmp_path / "foreign.yaml", ["actor_rollout_ref.rollout.n=8"]).rollout.n == 8

    def test_problems_name_the_line_of_the_foreign_key(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("data: {train: t.jsonl}\ngconfig:\n  n_samples: many\n")
        problem = refused(path)
        assert problem.key == "rollout.n"
        assert problem.origin.endswith("run.yaml, line 3, as gconfig.n_samples")


class TestOverrides:
    def test_names_of_theirs_are_taken_on_the_command_line(self) -> None:
        config = load_config(TASKS, ["actor_rollout_ref.actor.optim.lr=1e-4", "+gconfig.n_samples=4"])
        assert (config.actor.optim.lr, config.rollout.n) == (1e-4, 4)
        assert translations(config) == [
            "translated: actor_rollout_ref.actor.optim.lr -> actor.optim.lr: 0.0001",
            "translated: gconfig.n_samples -> rollout.n: 4",
        ]

    def test_part_of_a_group_can_be_changed(self) -> None:
        batch = {"data": {"train": "t.jsonl", "train_batch_size": 64}, "actor": {"ppo_mini_batch_size": 16}}
        assert load_config(batch).async_training.require_batches == 4
        config = load_config(batch, ["actor_rollout_ref.actor.ppo_mini_batch_size=32"])
        assert (config.actor.ppo_mini_batch_size, config.async_training.require_batches) == (32, 2)
        config = load_config(batch, ["async_training.require_batches=3"])
        assert config.groups_per_step == 48, "the last word on a key counts"
        clip = {**TASKS, "actor": {"eps_clip": 0.2, "eps_clip_higher": 0.28}}
        config = load_config(clip, ["actor.eps_clip=0.3"])
        assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.3, 0.28)

    def test_a_limit_in_groups_follows_the_size_of_a_group(self) -> None:
        source = {**TASKS, "rollout": {"max_concurrent_rollouts": 8}, "gconfig": {"n_samples": 4}}
        assert load_config(source).rollout.max_concurrent == 32
        assert load_config(source, ["rollout.n=8"]).rollout.max_concurrent == 64
        assert load_config(source, ["rollout.max_concurrent=100"]).rollout.max_concurrent == 100


@pytest.mark.parametrize(
    ("keys_given", "proximal"),
    [
        ({"use_decoupled_loss": True}, "recompute"),
        ({"use_decoupled_loss": True, "recompute_logprob": True}, "recompute"),
        ({"use_decoupled_loss": True, "recompute_logprobs": True}, "recompute"),
        ({"use_decoupled_loss": True, "recompute_logprob": True, "prox_logp_method": "recompute"}, "recompute"),
        ({"use_decoupled_loss": False, "recompute_logprob": False}, "bypass"),
        ({"use_decoupled_loss": False}, "bypass"),
        ({"recompute_logprob": False}, "bypass"),
        ({"use_decoupled_loss": False, "recompute_logprob": None}, "bypass"),
        ({"use_decoupled_loss": False, "proximal": "bypass"}, "bypass"),
    ],
)
def test_the_proximal_policy_by_areals_names(keys_given: dict[str, Any], proximal: str) -> None:
    assert load_config({**TASKS, "actor": keys_given}).actor.proximal == proximal


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (nested(("actor.use_decoupled_loss", True), ("actor.recompute_logprob", False)), "actor.recompute_logprob"),
        (nested(("actor.use_decoupled_loss", False), ("actor.recompute_logprob", True)), "actor.use_decoupled_loss"),
        (nested(("actor.recompute_logprob", True)), "actor.use_decoupled_loss"),
        (nested(("actor.recompute_logprob", True), ("actor.recompute_logprobs", False)), "actor.recompute_logprobs"),
        (nested(("actor.prox_logp_method", "recompute")), "actor.use_decoupled_loss"),
        (nested(("actor.use_decoupled_loss", True), ("actor.prox_logp_method", "metrics")), "actor.proximal"),
        (nested(("actor.use_decoupled_loss", "yes")), "true or false"),
        (nested(("actor.use_decoupled_loss", False), ("actor.proximal", "recompute")), "actor.proximal"),
        (
            nested(("actor.use_decoupled_loss", True), ("algorithm.rollout_correction.bypass_mode", True)),
            "algorithm.rollout_correction.bypass_mode",
        ),
        (nested(("gconfig.n_samples", 4), ("actor.group_size", 8)), "actor.group_size"),
        (nested(("gconfig.n_samples", 4), ("rollout.n", 8)), "rollout.n"),
        (nested(("actor.eps_clip", 0.2), ("actor.clip_ratio_low", 0.2), ("actor.clip_ratio_high", 0.3)), "eps_clip"),
        (nested(("data.train_batch_size", 8), ("actor.ppo_mini_batch_size", 16)), "data.train_batch_size"),
        (
            nested(("data.train_batch_size", 8), ("actor_rollout_ref.actor.ppo_mini_batch_size", 16)),
            "actor_rollout_ref.actor.ppo_mini_batch_size",
        ),
        (nested(("data.train_batch_size", 64), ("actor.ppo_mini_batch_size", 48)), "1, 2, 4, 8, 16, 32, 64"),
        (
            nested(
                ("data.train_batch_size", 64),
                ("actor.ppo_mini_batch_size", 16),
                ("async_training.require_batches", 2),
            ),
            "async_training.require_batches",
        ),
        (nested(("train_dataset.batch_size", 64), ("rollout.consumer_batch_size", 32)), "rollout.consumer_batch_size"),
        (nested(("train_dataset.batch_size", 64), ("actor.ppo_n_minibatches", 5)), "actor.ppo_n_minibatches"),
        (nested(("train_dataset.batch_size", "many")), "integer, at least 1"),
        (nested(("rollout.max_concurrent_rollouts", 0)), "integer, at least 1"),
        (nested(("actor.behav_imp_weight_cap", 5.0), ("actor.rejection_sampling", {"upper": 5.0})), "keep one"),
        (nested(("actor.behav_imp_weight_cap", 5.0), ("actor.behav_imp_weight_mode", "sequence_mask")), "geometric"),
        (nested(("actor.behav_imp_weight_mode", "token_mask")), "actor.behav_imp_weight_cap"),
        (nested(("actor.rejection_sampling", {"metric": "kl_k2"})), "rollout_rs"),
        (nested(("actor.c_clip", None)), "dual clipping"),
        (nested(("data.train_files", ["a.jsonl", "b.jsonl"])), "names 2 files"),
        (nested(("actor.temperature", "${gconfig.temperature}")), "gconfig.temperature"),
        (nested(("gconfig.n_sample", 4)), "did you mean gconfig.n_samples?"),
        (nested(("actor_rollout_ref.rollout.temprature", 1)), "did you mean actor_rollout_ref.rollout.temperature?"),
        ({"actor_rollout_ref.rollout.n": 4}, "actor_rollout_ref: {rollout: {n: ...}}"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_contradictions_are_refused_and_name_both(source: dict[str, Any], named: str) -> None:
    data = source.get("data", {})
    problem = refused({**source, "data": data if "train_files" in data else {"train": "t.jsonl", **data}})
    assert named in str(problem)
    assert problem.fix


@pytest.mark.parametrize(
    ("names", "bound"),
    [
        ({"behav_imp_weight_cap": 5.0}, (1e-9, 5.0)),
        ({"behav_imp_weight_cap": 5.0, "behav_imp_weight_mode": "token_truncate"}, 5.0),
        ({"rejection_sampling": {"metric": "ratio", "upper": 4.0}}, (1e-9, 4.0)),
        ({"rejection_sampling": {"upper": 4.0, "lower": 0.5}}, (0.5, 4.0)),
        ({"rejection_sampling": {"action": "clamp", "upper": 4.0}}, 4.0),
    ],
)
def test_the_behaviour_weight_by_areals_names(names: dict[str, Any], bound: Any) -> None:
    correction = load_config({**TASKS, "actor": names}).algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", bound)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"data": {"train_batch_size": 64}}, (64, 1)),
        ({"data": {"train_batch_size": 64}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16}}}, (16, 4)),
        ({"data": {"train_batch_size": 64}, "actor": {"ppo_mini_batch_size": 16}}, (16, 4)),
        ({"data": {"train_batch_size": 64}, "async_training": {"require_batches": 2}}, (32, 2)),
        ({"data": {"train_batch_size": 0}, "actor": {"ppo_mini_batch_size": 8}}, (8, 1)),
        ({"train_dataset": {"batch_size": 64}}, (64, 1)),
        ({"train_dataset": {"batch_size": 64}, "actor": {"ppo_n_minibatches": 4}}, (16, 4)),
        ({"rollout": {"consumer_batch_size": 64}, "actor": {"ppo_n_minibatches": 4}}, (16, 4)),
        ({"actor": {"ppo_n_minibatches": 4}}, (16, 4)),
    ],
)
def test_the_groups_of_a_training_step(given: dict[str, Any], sizes: tuple[int, int]) -> None:
    config = load_config(_over(TASKS, given))
    assert (config.actor.ppo_mini_batch_size, config.async_training.require_batches) == sizes


def test_the_length_of_a_run_in_groups() -> None:
    source = {"data": {"train": "t.jsonl", "train_batch_size": 64}, "rollout": {"total_rollout_steps": 6400}}
    assert load_config(source).trainer.total_steps == 100


def test_two_names_with_one_value_are_one_key() -> None:
    source = {**TASKS, "rollout": {"n": 4}, "gconfig": {"n_samples": 4}, "actor": {"group_size": 4}}
    assert load_config(source).rollout.n == 4


def test_null_is_as_good_as_leaving_a_key_out() -> None:
    source = {**TASKS, "total_train_steps": None, "gconfig": {"stop": None}, "actor": {"eps_clip_higher": None}}
    assert load_config(source) == load_config(TASKS)


def test_values_that_say_nothing_are_left_out() -> None:
    config = load_config({**TASKS, "actor_rollout_ref": {"actor": {"optim": {"lr_warmup_steps": -1}}}})
    assert config == load_config(TASKS) and not translations(config)


class TestMethods:
    """What AReaL says with several switches."""

    def read(self, **actor: Any) -> RunConfig:
        return load_config({**TASKS, "actor": actor})

    def test_lora_counts_only_if_it_is_used(self) -> None:
        details = {"lora_rank": 8, "lora_alpha": 16, "target_modules": []}
        assert self.read(use_lora=False, **details).model.lora_rank == 0
        model = self.read(use_lora=True, **details).model
        assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 16, "all-linear")

    def test_a_coefficient_of_zero_is_no_penalty(self) -> None:
        assert not self.read(kl_ctl=0.0, kl_estimator="k2").algorithm.use_kl_in_reward
        algorithm = self.read(kl_ctl=0.1, kl_estimator="k2").algorithm
        assert (algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef, algorithm.kl_penalty) == (True, 0.1, "k2")

    def test_the_penalty_for_length_needs_its_numbers(self) -> None:
        off = self.read(overlong_reward_penalty=False, overlong_tokens=None, overlong_penalty_factor=None)
        assert off.algorithm.overlong_buffer_len is None
        numbers = {"overlong_tokens": 64, "overlong_penalty_factor": 0.5}
        algorithm = self.read(overlong_reward_penalty=True, **numbers).algorithm
        assert (algorithm.overlong_buffer_len, algorithm.overlong_penalty_factor) == (64, 0.5)
        assert "overlong_tokens" in refused({**TASKS, "actor": {"overlong_reward_penalty": True}}).reason

    def test_each_switch_is_a_loss(self) -> None:
        assert self.read(use_cispo_loss=True, use_sapo_loss=False).actor.loss_mode == "cispo"
        actor = self.read(importance_sampling_level="sequence").actor
        assert (actor.loss_mode, actor.loss_agg_mode) == ("gspo", "seq-mean-token-mean")
        actor = self.read(use_sapo_loss=True, sapo_tau_neg=2.0).actor
        assert (actor.loss_mode, actor.tau_pos, actor.tau_neg) == ("sapo", 1.0, 2.0)
        assert self.read(importance_sampling_level="token", sapo_tau_pos=1.0).actor.loss_mode == "vanilla"
        both = refused({**TASKS, "actor": {"use_cispo_loss": True, "use_sapo_loss": True}})
        assert "choose two losses" in both.reason

    @pytest.mark.parametrize(
        ("norm", "estimator", "by_std"),
        [
            ({"mean_level": "group", "std_level": "group"}, "grpo", True),
            ({"mean_level": "group", "std_level": None}, "grpo", False),
            ({"mean_level": "group", "std_level": None, "mean_leave1out": True}, "rloo", True),
        ],
    )
    def test_normalised_rewards_are_an_estimator(self, norm: dict[str, Any], estimator: str, by_std: bool) -> None:
        algorithm = self.read(reward_norm={**norm, "group_size": 8}, adv_norm={"std_level": None}).algorithm
        assert (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo) == (estimator, by_std)
        assert algorithm.reward_norm is None
        assert algorithm.adv_norm is not None and algorithm.adv_norm.std_level is None

    def test_other_normalisations_are_asked_about(self) -> None:
        batch = {**TASKS, "actor": {"reward_norm": {"mean_level": "group", "std_level": "batch"}}}
        assert "algorithm.adv_estimator" in refused(batch).fix
        named = load_config({**batch, "algorithm": {"adv_estimator": "reinforce_plus_plus"}}).algorithm
        assert named.reward_norm is not None and named.reward_norm.std_level == "batch"

    def test_the_proximal_policy_may_be_interpolated(self) -> None:
        actor = self.read(use_decoupled_loss=True, prox_logp_method="loglinear").actor
        assert actor.proximal == "loglinear"

    def test_a_discount_of_one_is_none_whatever_the_estimator(self) -> None:
        assert self.read(discount=1.0, gae_lambda=1.0).algorithm.gamma == 1
        config = load_config({**TASKS, "algorithm": {"gamma": 1.0, "lam": 1, "adv_estimator": "grpo"}})
        assert config.algorithm.lam == 1


def test_what_verl_switches_off_may_stand_beside_it() -> None:
    verl = {
        "critic": {"optim": {"lr_warmup_steps": -1}},
        "algorithm": {
            "use_kl_in_reward": False,
            "kl_ctrl": {"kl_coef": 0.0},
            "gamma": None,
            "lam": None,
            "adv_estimator": "gae",
        },
        "actor_rollout_ref": {
            "model": {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear"},
            "actor": {"use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"},
        },
    }
    config = load_config(_over(TASKS, verl))
    assert (config.has_reference, config.model.lora_rank, config.algorithm.gamma) == (False, 0, 1.0)


def test_what_verl_switches_on_is_taken_with_its_details() -> None:
    verl = {
        "model": {"lora_rank": 8, "lora_alpha": 16},
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3+"},
    }
    config = load_config(_over(TASKS, {"actor_rollout_ref": verl}))
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 16)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (True, 0.01, "k3+")
