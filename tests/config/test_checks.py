"""Contradictions between keys, and keys that would be ignored, are refused at load with a valid value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import ConfigError, Problem, config_notes, dump_yaml, load_config

FILE = {"train": "t.jsonl"}
FUNCTION = {"train": "my.tasks:load"}


def refused(data: dict[str, Any], *overrides: str) -> Problem:
    """The one problem of a configuration."""
    with pytest.raises(ConfigError) as caught:
        load_config({"data": data}, overrides)
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("overrides", "keys", "valid"),
    [
        (
            ["rollout.n=8", "rollout.max_concurrent=4"],
            ["rollout.max_concurrent", "rollout.n"],
            "rollout.max_concurrent=8",
        ),
        (
            ["rollout.max_head_offpolicyness=1", "async_training.staleness_threshold=1.5"],
            ["rollout.max_head_offpolicyness", "async_training.staleness_threshold"],
            "rollout.max_head_offpolicyness=2",
        ),
        (["rollout.n=1"], ["rollout.n", "algorithm.adv_estimator"], "rollout.n=2"),
        (["rollout.n=1", "algorithm.adv_estimator=rloo"], ["rollout.n", "algorithm.adv_estimator"], "rollout.n=2"),
        (
            ["rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus", "rollout.filter_zero_variance=true"],
            ["rollout.filter_zero_variance", "rollout.n"],
            "rollout.filter_zero_variance=false",
        ),
        (
            ["async_training.on_stale=requeue", "rollout.max_attempts=1"],
            ["rollout.max_attempts", "async_training.on_stale"],
            "rollout.max_attempts=2",
        ),
        (
            ["rollout.kv_cache_tokens=1000"],
            ["rollout.kv_cache_tokens", "rollout.max_model_len"],
            "rollout.kv_cache_tokens=2048",
        ),
        (["data.val=v.jsonl", "val.top_k=0"], ["val.top_k"], "val.top_k=1"),
        (
            ["rollout.engine=vllm", "rollout.temperature=2.5"],
            ["rollout.temperature", "rollout.engine"],
            "rollout.temperature=2",
        ),
        (
            ["rollout.engine=vllm", "data.val=v.jsonl", "val.temperature=3"],
            ["val.temperature", "rollout.engine"],
            "val.temperature=2",
        ),
        (
            ["actor.loss_scale_factor=100"],
            ["actor.loss_scale_factor", "actor.loss_agg_mode"],
            "actor.loss_agg_mode=seq-mean-token-sum-norm",
        ),
        (["trainer.test_freq=5"], ["trainer.test_freq", "data.val"], "data.val=held_out.jsonl"),
        (
            ["rollout.n=8", "rollout.max_concurrent=8", "algorithm.adv_estimator=remax"],
            ["rollout.max_concurrent", "rollout.n"],
            "rollout.max_concurrent=9",
        ),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "actor.proximal=bypass"],
            ["algorithm.adv_estimator", "actor.proximal"],
            "actor.proximal=recompute",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1]"],
            ["algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"],
            "algorithm.gdpo_reward_weights=[1, 2]",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights=[0]"],
            ["algorithm.gdpo_reward_weights"],
            "algorithm.gdpo_reward_weights=[1]",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a, b, a]"],
            ["algorithm.gdpo_reward_keys"],
            "algorithm.gdpo_reward_keys=[a, b]",
        ),
        (
            ["algorithm.adv_norm={mean_level: null, std_level: null}"],
            ["algorithm.adv_norm"],
            "algorithm.adv_norm.mean_level=batch",
        ),
        (
            ["algorithm.adv_estimator=gdpo"],
            ["algorithm.gdpo_reward_keys", "algorithm.adv_estimator"],
            "algorithm.gdpo_reward_keys=[accuracy]",
        ),
        (
            ["actor.loss_mode=gpg", "actor.proximal=bypass"],
            ["actor.loss_mode", "actor.proximal"],
            "actor.proximal=recompute",
        ),
        (
            ["algorithm.overlong_buffer_len=600"],
            ["algorithm.overlong_buffer_len", "data.max_response_length"],
            "algorithm.overlong_buffer_len=512",
        ),
        (
            ["actor.loss_mode=gspo"],
            ["actor.loss_agg_mode", "actor.loss_mode"],
            "actor.loss_agg_mode=seq-mean-token-mean",
        ),
        (["actor.loss_mode=dro"], ["actor.dro_beta", "actor.loss_mode"], "actor.dro_beta=0.1"),
        (
            ["actor.loss_mode=clip_cov", "actor.clip_cov_lb=7"],
            ["actor.clip_cov_lb", "actor.clip_cov_ub"],
            "actor.clip_cov_lb=2",
        ),
        (["actor.use_kl_loss=true", "actor.kl_loss_type=k4"], ["actor.kl_loss_type"], "actor.kl_loss_type=k3+"),
        (
            ["actor.proximal=loglinear", "algorithm.rollout_correction.m2_threshold=0.04"],
            ["algorithm.rollout_correction.m2_threshold", "actor.proximal"],
            "actor.proximal=recompute",
        ),
        (["rollout.top_p=0.9"], ["rollout.top_p", "val.top_p"], "rollout.top_p=1"),
        (["rollout.top_k=50"], ["rollout.top_k", "val.top_k"], "rollout.top_k=-1"),
        (
            ["data.max_response_length=2000"],
            ["rollout.max_model_len", "data.max_prompt_length", "data.max_response_length"],
            "rollout.max_model_len=3024",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=true", "actor.proximal=recompute"],
            ["algorithm.rollout_correction.bypass_mode", "actor.proximal"],
            "actor.proximal=bypass",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=false", "actor.proximal=bypass"],
            ["algorithm.rollout_correction.bypass_mode", "actor.proximal"],
            "actor.proximal=recompute",
        ),
        (["actor.loss_mode=bypass_mode"], ["actor.loss_mode", "actor.proximal"], "actor.proximal=bypass"),
        (["algorithm.adv_estimator=grop"], ["algorithm.adv_estimator", "grpo, "], "algorithm.adv_estimator=grpo"),
        (["actor.loss_mode=vanila"], ["actor.loss_mode", "vanilla"], "actor.loss_mode=vanilla"),
        (["actor.loss_agg_mode=token_mean"], ["actor.loss_agg_mode", "token-mean"], "actor.loss_agg_mode=token-mean"),
        (["trainer.experiment_name=a/b"], ["trainer.experiment_name"], "trainer.experiment_name=a-b"),
        (["trainer.experiment_name='..'"], ["trainer.experiment_name"], "trainer.experiment_name=a"),
    ],
)
def test_contradictions_name_the_keys_and_the_fix_loads(overrides: list[str], keys: list[str], valid: str) -> None:
    problem = refused(FILE, *overrides)
    assert problem.key == keys[0]
    assert all(key in str(problem) for key in keys)
    key, _, value = valid.partition("=")
    words = (key, key.removeprefix("algorithm."), value, "name without slashes", "each once")
    assert any(word in problem.fix for word in words)
    load_config({"data": FILE}, [*overrides, valid])


def test_a_staleness_bound_equal_to_the_threshold_is_fine() -> None:
    config = load_config({"data": FILE}, ["rollout.max_head_offpolicyness=2", "async_training.staleness_threshold=2"])
    assert config.max_lag == config.eta == 2


def test_the_bound_follows_a_fractional_threshold() -> None:
    assert load_config({"data": FILE}, ["async_training.staleness_threshold=0.15"]).max_lag == 1


BYPASS = "actor.proximal=bypass"
REINFORCE = "algorithm.rollout_correction.loss_type=reinforce"
NO_VALIDATION = {"train": "t.jsonl"}


@pytest.mark.parametrize(
    ("data", "overrides", "key", "cause"),
    [
        (
            FILE,
            ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"],
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.adv_estimator",
        ),
        (
            FILE,
            [BYPASS, "algorithm.rollout_correction.rollout_is=token"],
            "algorithm.rollout_correction.rollout_is",
            "actor.proximal",
        ),
        (
            FILE,
            [BYPASS, "algorithm.rollout_correction.rollout_is_threshold=2"],
            "algorithm.rollout_correction.rollout_is_threshold",
            "actor.proximal",
        ),
        (FILE, [REINFORCE], "algorithm.rollout_correction.loss_type", "actor.proximal"),
        (
            FILE,
            ["algorithm.rollout_correction={rollout_is: null, rollout_is_threshold: 3}"],
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is",
        ),
        (FILE, [BYPASS, REINFORCE, "actor.clip_ratio_low=0.1"], "actor.clip_ratio_low", "actor.proximal"),
        (FILE, [BYPASS, REINFORCE, "actor.loss_mode=vanilla"], "actor.loss_mode", "actor.proximal"),
        *(
            (FILE, [f"algorithm.adv_estimator={estimator}", f"algorithm.{key}={value}"], f"algorithm.{key}", estimator)
            for estimator, key, value in (
                ("rloo", "gamma", 0.9),
                ("reinforce_plus_plus", "lam", 0.9),
                ("grpo", "gae_timestep", "turn"),
                ("grpo", "gdpo_reward_keys", "[a]"),
                ("grpo", "gdpo_reward_weights", "[1]"),
            )
        ),
        *(
            (FILE, [f"actor.loss_mode={mode}", f"actor.{key}={value}", *more], f"actor.{key}", mode)
            for mode, key, value, *more in (
                ("vanilla", "tau_pos", 1),
                ("vanilla", "dro_beta", 1),
                ("cispo", "clip_ratio_c", 4),
                ("cispo", "clip_cov_ratio", 0.1),
                ("clip_cov", "kl_cov_ratio", 0.1),
                ("gpg", "clip_ratio_low", 0.1),
                ("kl_cov", "clip_ratio_high", 0.1),
                ("sapo", "clip_ratio_high", 0.1, "actor.loss_agg_mode=seq-mean-token-mean"),
            )
        ),
        (
            FILE,
            ["actor.loss_agg_mode=episode-mean", "algorithm.branch_weighting=token"],
            "algorithm.branch_weighting",
            "episode-mean",
        ),
        (
            FILE,
            ["algorithm.overlong_penalty_factor=2"],
            "algorithm.overlong_penalty_factor",
            "algorithm.overlong_buffer_len",
        ),
        (
            FILE,
            ["algorithm.adv_norm={mean_level: null, mean_leave1out: true}"],
            "algorithm.adv_norm.mean_leave1out",
            "algorithm.adv_norm.mean_level",
        ),
        (
            FILE,
            ["algorithm.reward_norm={std_level: null, eps: 0.1}"],
            "algorithm.reward_norm.eps",
            "algorithm.reward_norm.std_level",
        ),
        (FILE, ["algorithm.kl_penalty=k3"], "algorithm.kl_penalty", "algorithm.use_kl_in_reward"),
        (FILE, ["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl", "algorithm.use_kl_in_reward"),
        (
            FILE,
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=9"],
            "algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl.type",
        ),
        (FILE, ["actor.kl_loss_coef=0.1"], "actor.kl_loss_coef", "actor.use_kl_loss"),
        (FILE, ["actor.kl_loss_type=k3"], "actor.kl_loss_type", "actor.use_kl_loss"),
        (FILE, ["critic.optim.lr=0.1"], "critic", "algorithm.adv_estimator"),
        (FILE, ["trainer.critic_warmup=3"], "trainer.critic_warmup", "algorithm.adv_estimator"),
        (FILE, ["model.lora_alpha=3"], "model.lora_alpha", "model.lora_rank"),
        (FILE, ["model.target_modules=all-linear"], "model.target_modules", "model.lora_rank"),
        (FILE, [BYPASS, "actor.prox_anchor=step"], "actor.prox_anchor", "actor.proximal"),
        (
            FILE,
            ["actor.prox_anchor=publish"],
            "actor.prox_anchor",
            "async_training.trigger_parameter_sync_step",
        ),
        (FILE, ["data.train_args={a: 1}"], "data.train_args", "data.train"),
        (FILE, ["data.val=v.jsonl", "data.val_args={a: 1}"], "data.val_args", "data.val"),
        (FUNCTION, ["data.val_args={a: 1}"], "data.val_args", "data.val"),
        (FUNCTION, ["data.prompt_key=question"], "data.prompt_key", "data.train"),
        (FUNCTION, ["data.answer_key=solution"], "data.answer_key", "data.train"),
        (FILE, ["env.args={size: 3}"], "env.args", "env.cls"),
        ({"train": "t.parquet"}, ["data.train_args={a: 1}"], "data.train_args", "data.train"),
        (FILE, ["data.sampler_args={a: 1}"], "data.sampler_args", "data.sampler"),
        (FILE, ["data.sampler=a:B", "data.shuffle=true"], "data.shuffle", "data.sampler"),
        (
            FILE,
            ["rollout.on_truncation=exclude", "rollout.unscored_reward=-1"],
            "rollout.unscored_reward",
            "rollout.on_truncation",
        ),
        (FILE, ["val.limit=10"], "val.limit", "data.val"),
        (FILE, ["val.temperature=0.6"], "val.temperature", "data.val"),
        (FILE, ["val.top_p=0.9"], "val.top_p", "data.val"),
        (FILE, ["val.top_k=9"], "val.top_k", "data.val"),
        (FILE, ["data.val=v.jsonl", "val.temperature=0", "val.top_p=0.9"], "val.top_p", "val.temperature"),
        (FILE, ["data.val=v.jsonl", "val.temperature=0", "val.top_k=9"], "val.top_k", "val.temperature"),
        (FILE, ["val.n=2"], "val.n", "data.val"),
        (FILE, ["trainer.val_before_train=true"], "trainer.val_before_train", "data.val"),
        (FILE, ["actor.optim.min_lr_ratio=0.1"], "actor.optim.min_lr_ratio", "actor.optim.lr_scheduler_type"),
        (
            FILE,
            ["trainer.total_epochs=2", "actor.optim.lr_scheduler_type=linear"],
            "actor.optim.lr_scheduler_type",
            "trainer.total_steps",
        ),
        (
            FILE,
            [BYPASS, REINFORCE, "algorithm.rollout_correction.rollout_is_batch_normalize=true"],
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "actor.proximal",
        ),
    ],
)
def test_keys_without_effect_are_refused_and_name_the_cause(
    data: dict[str, Any], overrides: list[str], key: str, cause: str
) -> None:
    problem = refused(data, *overrides)
    assert problem.key == key
    assert cause in problem.reason + problem.fix


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.norm_adv_by_std_in_grpo=false"],
        ["algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.gamma=1"],
        ["algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gae_timestep=turn", "critic.path=tiny"],
        [
            "algorithm.adv_estimator=mine:estimate",
            "algorithm.gamma=0.9",
            "actor.loss_mode=mine:loss",
            "actor.tau_pos=2",
        ],
        ["algorithm.adv_estimator=remax", "rollout.n=1"],
        ["actor.loss_mode=dppo_tv", "actor.clip_ratio_c=5", "actor.clip_ratio_low=0.1"],
        ["actor.proximal=loglinear", "actor.prox_anchor=publish", "async_training.trigger_parameter_sync_step=2"],
        ["actor.prox_anchor=step"],
        ["model.lora_rank=8", "model.lora_alpha=32", "model.target_modules=[q_proj]", "actor.use_kl_loss=true"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, target_kl: 0.2}"],
        [BYPASS, "algorithm.rollout_correction={rollout_is: null, bypass_mode: true, loss_type: ppo_clip}"],
        [BYPASS, "algorithm.rollout_correction={rollout_rs: [seq_mean_k1], rollout_rs_threshold: [[0.999, 1.001]]}"],
        [BYPASS, REINFORCE, "algorithm.rollout_correction.rollout_is=sequence"],
        [BYPASS, REINFORCE, "actor.loss_mode=bypass_mode"],
        ["data.train=my.tasks:load", "data.train_args={a: 1}"],
        ["data.train=my.tasks:load", "data.val=v.jsonl", "data.prompt_key=question"],
        ["env.cls=a:B", "env.args={size: 3}"],
        ["trainer.val_before_train=false"],
        ["data.train=owner/name", "data.train_args={split: train}", "data.prompt_key=question"],
        ["data.sampler=a:B", "data.sampler_args={a: 1}"],
        ["rollout.unscored_reward=-1"],
        ["rollout.on_truncation=exclude", "rollout.on_timeout=score", "rollout.unscored_reward=-1"],
        ["rollout.top_p=1", "rollout.top_k=-1", "rollout.max_attempts=3"],
        ["data.val=v.jsonl", "val.temperature=0.6", "val.top_p=0.9", "val.top_k=20"],
        ["data.val=v.jsonl", "val.limit=10", "trainer.test_freq=5"],
        ["trainer.total_steps=9", "actor.optim.lr_scheduler_type=cosine", "actor.optim.min_lr_ratio=0.1"],
    ],
)
def test_keys_with_an_effect_are_taken(overrides: list[str]) -> None:
    load_config({"data": FILE}, overrides)


MATHS: dict[str, Any] = {"train": "my.tasks:load", "train_args": {"split": "a"}, "env": {"cls": "a:B"}}
CODE: dict[str, Any] = {"train": "code.jsonl", "val": "held_out.jsonl", "prompt_key": "question", "weight": 2}


class TestEnvironments:
    """Several environments: each has keys of its own, under the same rules."""

    def refused(self, environments: dict[str, Any], **sections: Any) -> Problem:
        with pytest.raises(ConfigError) as caught:
            load_config({"environments": environments, **sections})
        [problem] = caught.value.problems
        return problem

    def test_keys_with_an_effect_are_taken_and_dumped(self, tmp_path: Path) -> None:
        config = load_config({"environments": {"maths": MATHS, "code": CODE}}, ["trainer.test_freq=3", "val.limit=9"])
        path = tmp_path / "config.yaml"
        path.write_text(dump_yaml(config))
        assert load_config(path) == config
        assert not any(note.startswith("validation: none") for note in config_notes(config))

    @pytest.mark.parametrize(
        ("part", "key", "cause"),
        [
            ({"train": "t.jsonl", "train_args": {"a": 1}}, "train_args", "train"),
            ({"train": "t.jsonl", "val": "v.parquet", "val_args": {"a": 1}}, "val_args", "val"),
            ({"train": "t.jsonl", "val_args": {"a": 1}}, "val_args", "val"),
            ({"train": "a:load", "prompt_key": "question"}, "prompt_key", "train"),
            ({"train": "t.jsonl", "env": {"args": {"a": 1}}}, "env.args", "env.cls"),
        ],
    )
    def test_the_rules_are_those_of_a_single_one(self, part: dict[str, Any], key: str, cause: str) -> None:
        problem = self.refused({"maths": MATHS, "other": part})
        assert problem.key == f"environments.other.{key}"
        assert f"environments.other.{cause}" in problem.reason + problem.fix

    @pytest.mark.parametrize(
        ("section", "values", "key"),
        [
            ("data", {"train": "t.jsonl"}, "data.train"),
            ("data", {"val": "t.jsonl"}, "data.val"),
            ("data", {"prompt_key": "question"}, "data.prompt_key"),
            ("data", {"answer_key": None}, "data.answer_key"),
            ("data", {"train_args": {"a": 1}}, "data.train_args"),
            ("data", {"val_args": {"a": 1}}, "data.val_args"),
            ("agent", {"loop": "a:B"}, "agent"),
            ("env", {"cls": "a:B", "args": {"a": 1}}, "env"),
        ],
    )
    def test_what_each_has_for_itself_is_not_said_once_more(
        self, section: str, values: dict[str, Any], key: str
    ) -> None:
        problem = self.refused({"maths": MATHS}, **{section: values})
        assert (problem.key, problem.others) == (key, ("environments",))
        assert "environments.maths." in problem.fix

    def test_validation_needs_held_out_tasks_of_any_of_them(self) -> None:
        problem = self.refused({"maths": MATHS}, trainer={"test_freq": 2})
        assert problem.key == "trainer.test_freq" and "environments.NAME.val" in problem.fix
        problem = self.refused({"maths": MATHS}, val={"top_p": 0.5})
        assert problem.key == "val.top_p"

    def test_a_name_has_no_dots(self) -> None:
        assert self.refused({"ma.ths": {"train": "t.jsonl"}}).key == "environments"

    def test_problems_name_the_environments_own_key(self) -> None:
        found = self.refused({"maths": {"train": "t.jsonl", "weight": 0}})
        assert (found.key, "above 0" in found.reason) == ("environments.maths.weight", True)
        found = self.refused({"maths": {"train": "t.jsonl", "wieght": 1}})
        assert found.key == "environments.maths.wieght" and "weight" in found.fix
        assert self.refused({"maths": {}}).key == "environments.maths.train"


def test_bypass_by_verls_name_alone_is_a_choice() -> None:
    config = load_config({"data": FILE}, ["algorithm.rollout_correction.bypass_mode=true"])
    assert config.actor.proximal == "bypass"
    config = load_config({"data": FILE}, ["algorithm.rollout_correction.bypass_mode=false"])
    assert config.actor.proximal == "recompute"


@pytest.mark.parametrize("source", [{}, {"environments": {}}, {"data": {"prompt_key": "question"}}])
def test_tasks_are_asked_for(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    [problem] = caught.value.problems
    assert problem.key == "data.train" and "environments" in problem.fix
