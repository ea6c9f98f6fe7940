"""verl's and AReaL's key names, row by row: each is read, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import ConfigError, RunConfig, explain, load_config
from agentrl.config.areal_names import AREAL
from agentrl.config.foreign import NOT_GIVEN, Absent, Fixed, Renamed, foreign_keys
from agentrl.config.foreign_groups import GROUPS
from agentrl.config.keys import keys
from agentrl.config.tree import at
from agentrl.config.verl_names import VERL
from tests.support.configs import TASKS, laid_over, nested, refused, translations

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
    "model.lora_merge": False,
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
    "rollout.tensor_parallel_size": {"rollout": {"engine": "vllm", "n_gpus_per_node": 3}},
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
    "model.lora_merge": {"model": {"lora_rank": 4}, "rollout": {"engine": "vllm"}},
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


RENAMED = [key.row for key in foreign_keys().values() if isinstance(key.row, Renamed)]
TRANSLATED = [row for row in RENAMED if not row.shared or row.name in FOREIGN_VALUES]
"""The others are agentrl's own names, which take verl's way to say nothing too."""
FIXED = [key.row for key in foreign_keys().values() if isinstance(key.row, Fixed)]
ALL_NAMES = [*foreign_keys(), *(name for group in GROUPS for name in group.names)]
ABSENT = [key.row for key in foreign_keys().values() if isinstance(key.row, Absent)]


class TestTables:
    """Every row does what it says."""

    def test_names_are_not_agentrls_unless_a_row_says_so(self) -> None:
        for name, key in foreign_keys().items():
            known = name in keys() and keys()[name].section is None
            assert known == (isinstance(key.row, Renamed) and key.row.shared), name
        assert not {name for group in GROUPS for name in group.names} & {*keys(), *foreign_keys()}

    def test_a_name_stands_in_one_table(self) -> None:
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
            source = laid_over(source, nested((row.name, written)))
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
            assert translations(load_config(laid_over(TASKS, nested((row.name, value))))) == []
        problem = refused(laid_over(TASKS, nested((row.name, "something else"))))
        assert problem.key == row.name
        assert "has no counterpart" in problem.reason and row.why in problem.reason

    @pytest.mark.parametrize("row", ABSENT, ids=lambda row: row.name)
    @pytest.mark.parametrize("value", [1, {"a": 1, "b": {"c": 2}}], ids=["key", "section"])
    def test_a_key_without_a_counterpart_is_refused_with_the_reason(self, row: Absent, value: Any) -> None:
        problem = refused(laid_over(TASKS, nested((row.name, value))))
        if isinstance(value, dict) and any(known.startswith(f"{row.name}.") for known in ALL_NAMES):
            assert (problem.key, problem.fix) == (f"{row.name}.a", "remove them"), "other keys of the section are known"
            assert f"{row.name}.a, {row.name}.b.c have no counterpart: {row.why}" in problem.reason
        else:
            assert (problem.key, problem.fix) == (row.name, "remove it")
            assert problem.reason.endswith(f"has no counterpart: {row.why}")

    @pytest.mark.parametrize("name", ALL_NAMES)
    def test_every_name_can_be_explained(self, name: str) -> None:
        assert name in explain(name)

    def test_reasons_and_meanings_name_keys_that_exist(self) -> None:
        sections = "|".join({name.partition(".")[0] for name in keys()})
        texts = [row.why for row in (*FIXED, *ABSENT)] + [group.meaning for group in GROUPS]
        for text in texts:
            for name in re.findall(rf"\b(?:{sections})\.[a-z_]+(?:\.[a-z_]+)*", text):
                assert name in keys() or name in foreign_keys(), (name, text)
