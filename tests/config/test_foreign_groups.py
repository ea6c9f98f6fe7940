"""Keys of verl and AReaL that only say something together: what they come to, and what contradicts what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.config import ConfigError, RunConfig, load_config
from tests.support.configs import TASKS, laid_over, nested, refused, translations


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
        (
            nested(
                ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
                ("algorithm.rollout_correction.bypass_mode", True),
                ("actor.loss_agg_mode", "seq-mean-token-mean"),
            ),
            "verl trains its clipped PPO",
        ),
        (nested(("reward.reward_kwargs.overlong_buffer_cfg.enable", True)), "overlong_buffer_cfg.len is not given"),
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
    config = load_config(laid_over(TASKS, given))
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

    @pytest.mark.parametrize(
        "actor",
        [
            {"reward_norm": {"mean_level": "group", "std_level": "group", "eps": 1e-3}},
            {"reward_norm": {"mean_level": "group", "std_level": "group"}, "kl_ctl": 0.1},
            {"adv_norm": {"mean_level": "batch", "std_level": "batch"}},
        ],
    )
    def test_what_no_estimator_does_needs_a_name(self, actor: dict[str, Any]) -> None:
        source = {**TASKS, "actor": actor}
        assert "algorithm.adv_estimator" in refused(source).fix
        named = load_config({**source, "algorithm": {"adv_estimator": "reinforce_plus_plus"}})
        assert (named.algorithm.reward_norm or named.algorithm.adv_norm) is not None

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
    config = load_config(laid_over(TASKS, verl))
    assert (config.has_reference, config.model.lora_rank, config.algorithm.gamma) == (False, 0, 1.0)


@pytest.mark.parametrize(
    "section",
    [
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
    ],
)
def test_verls_penalty_for_length_is_found_in_a_section_without_a_counterpart(section: str) -> None:
    for enable, expected in ((True, (64, 0.5)), (False, (None, 1.0))):
        buffer = {"enable": enable, "len": 64, "penalty_factor": 0.5, "log": True}
        source = nested((section, buffer), ("reward.reward_kwargs.max_resp_len", 512))
        algorithm = load_config(laid_over(TASKS, source)).algorithm
        assert (algorithm.overlong_buffer_len, algorithm.overlong_penalty_factor) == expected


def test_only_what_has_no_counterpart_is_blamed_in_a_section_that_holds_more() -> None:
    buffer = {"enable": True, "len": 64, "penalty_factor": 0.5}
    source = nested(("reward_model.overlong_buffer", buffer), ("reward_model.reward_manager", "dapo"))
    problem = refused(laid_over(TASKS, source))
    assert problem.key == "reward_model.reward_manager" and "overlong" not in problem.reason
    critic = nested(("critic.model.path", "tiny"), ("critic.model.lora_rank", 4), ("algorithm.adv_estimator", "gae"))
    assert refused(laid_over(TASKS, critic)).key == "critic.model.lora_rank"


VERL_KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
BUFFER = {"enable": True, "len": 8, "penalty_factor": 1.0}
NORM = {"mean_level": "group", "std_level": "group"}
BATCHES = (("data.train_batch_size", 16), ("actor.ppo_mini_batch_size", 4))


@pytest.mark.parametrize(
    ("lower", "overrides", "key", "value"),
    [
        (
            [("actor_rollout_ref.actor", VERL_KL)],
            ["actor_rollout_ref.actor.use_kl_loss=false"],
            "actor.use_kl_loss",
            False,
        ),
        ([("actor_rollout_ref.model.lora_rank", 8)], ["actor_rollout_ref.model.lora_rank=0"], "model.lora_rank", 0),
        ([("actor_rollout_ref.model.lora_rank", 8)], ["actor_rollout_ref.model.lora_rank=null"], "model.lora_rank", 0),
        ([("actor", {"use_lora": True, "lora_rank": 8})], ["actor.use_lora=false"], "model.lora_rank", 0),
        ([("actor.kl_ctl", 0.1)], ["actor.kl_ctl=0"], "algorithm.use_kl_in_reward", False),
        ([("actor.kl_ctl", 0.1)], ["actor.kl_ctl=null"], "algorithm.use_kl_in_reward", False),
        ([("actor.use_sapo_loss", True)], ["actor.use_sapo_loss=false"], "actor.loss_agg_mode", "token-mean"),
        (
            [("actor.use_sapo_loss", True)],
            ["actor.use_sapo_loss=false", "actor.use_cispo_loss=true"],
            "actor.loss_agg_mode",
            "token-mean",
        ),
        (
            [("reward_model.overlong_buffer", BUFFER)],
            ["reward_model.overlong_buffer.enable=false"],
            "algorithm.overlong_buffer_len",
            None,
        ),
        ([("actor.eps_clip", 0.3)], ["actor.eps_clip=null"], "actor.clip_ratio_high", 0.2),
        ([("actor.eps_clip", 0.3)], ["actor=null"], "actor.clip_ratio_high", 0.2),
        (
            [("actor.behav_imp_weight_cap", 5)],
            ["actor.behav_imp_weight_cap=null"],
            "algorithm.rollout_correction.rollout_is_threshold",
            2.0,
        ),
        (
            [("actor.reward_norm", NORM), ("algorithm.adv_estimator", "rloo")],
            ["actor.reward_norm=null"],
            "algorithm.reward_norm",
            None,
        ),
        ([("actor.reward_norm", {**NORM, "std_level": None})], ["algorithm.adv_estimator=rloo"], None, None),
        ([("rollout.total_rollout_steps", 160)], ["rollout.total_rollout_steps=null"], "trainer.total_steps", None),
        (BATCHES, ["data.train_batch_size=null"], "async_training.require_batches", 1),
        (BATCHES, ["actor.ppo_mini_batch_size=null"], "actor.ppo_mini_batch_size", 16),
        (
            [("actor_rollout_ref.actor.grad_clip", 0.3)],
            ["actor_rollout_ref.actor.grad_clip=null"],
            "actor.grad_clip",
            1.0,
        ),
        (
            [("algorithm.rollout_correction.bypass_mode", True)],
            ["algorithm.rollout_correction=null"],
            "actor.proximal",
            "recompute",
        ),
        (
            [("actor.proximal", "loglinear")],
            ["actor.proximal=null", "actor.use_decoupled_loss=false"],
            "actor.proximal",
            "bypass",
        ),
    ],
)
def test_what_a_later_layer_switches_off_is_off(lower: Any, overrides: list[str], key: str | None, value: Any) -> None:
    config: Any = load_config(laid_over(TASKS, nested(*lower)), overrides)
    for part in key.split(".") if key else ():
        config = getattr(config, part)
    assert key is None or config == value


@pytest.mark.parametrize(
    ("lower", "overrides"),
    [
        (
            [("actor", {"use_decoupled_loss": False, "recompute_logprob": True})],
            ["actor.proximal=recompute", "algorithm.rollout_correction.rollout_is=null"],
        ),
        (
            [
                ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov"),
                ("algorithm.rollout_correction.bypass_mode", True),
            ],
            ["actor.loss_mode=vanilla"],
        ),
    ],
)
def test_a_contradiction_is_over_when_a_later_layer_says_what_it_was_about(lower: Any, overrides: list[str]) -> None:
    source = laid_over(TASKS, nested(*lower))
    refused(source)
    load_config(source, overrides)


@pytest.mark.parametrize("section", ["reward_model", "reward", "critic.model", "actor.mb_spec", "saver"])
def test_a_section_that_asks_for_nothing_is_nothing(section: str) -> None:
    for value in ("{}", "null"):
        load_config(TASKS, [f"{section}={value}"])


class TestNormsWithoutAnEstimator:
    """AReaL's norms that no estimator stands for: the name that is asked for may come from anywhere."""

    SOURCE: ClassVar = {**TASKS, "actor": {"adv_norm": {"mean_level": "batch", "std_level": "batch"}}}

    def test_it_may_come_from_an_override(self) -> None:
        assert refused(self.SOURCE).key == "actor.adv_norm"
        config = load_config(self.SOURCE, ["algorithm.adv_estimator=reinforce_plus_plus"])
        assert config.algorithm.adv_norm is not None

    def test_it_may_come_from_a_file_that_extends_the_other(self, tmp_path: Path) -> None:
        norm = "{mean_level: batch, std_level: batch}"
        (tmp_path / "base.yaml").write_text(f"data: {{train: t.jsonl}}\nactor: {{adv_norm: {norm}}}\n")
        run = tmp_path / "run.yaml"
        run.write_text("extends: base.yaml\nalgorithm: {adv_estimator: reinforce_plus_plus}\n")
        assert load_config(run).algorithm.adv_norm is not None

    def test_the_norm_may_be_taken_back(self) -> None:
        assert load_config(self.SOURCE, ["actor.adv_norm=null"]).algorithm.adv_norm is None

    @pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
    def test_with_a_critic_it_is_gae_that_is_proposed(self, norm: str) -> None:
        source = {**TASKS, "actor": {norm: {"mean_level": "group", "std_level": "group"}}, "critic": {"path": "tiny"}}
        with pytest.raises(ConfigError) as caught:
            load_config(source)
        [problem] = [problem for problem in caught.value.problems if problem.key == f"actor.{norm}"]
        assert "gae, which reads the critic" in problem.fix
        assert load_config(source, ["algorithm.adv_estimator=gae"]).has_critic


def test_verls_loss_by_its_own_name() -> None:
    loss = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "geo_mean"}}}}
    assert load_config(laid_over(TASKS, loss)).actor.loss_mode == "geo_mean"


def test_what_verl_switches_on_is_taken_with_its_details() -> None:
    verl = {
        "model": {"lora_rank": 8, "lora_alpha": 16},
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3+"},
    }
    config = load_config(laid_over(TASKS, {"actor_rollout_ref": verl}))
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 16)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (True, 0.01, "k3+")
