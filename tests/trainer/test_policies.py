"""The policies beside the current one: reference, adapters, anchors, and what they add to the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.lora import check_lora
from agentrl.record import Batch
from agentrl.tiny import tiny_model_path
from agentrl.trainer.actor import Actor
from agentrl.trainer.lora import write_adapter
from agentrl.trainer.policy_files import snapshot, write_policy
from tests.support.gradients import assert_gradients_agree, branches_of, largest

Fixture = Callable[..., Any]
LORA = ("model.lora_rank=4", "model.lora_alpha=8")
BYPASS = "actor.proximal=bypass"


class TestReference:
    @pytest.mark.parametrize("lora", [(), LORA], ids=["a copy", "adapters left out"])
    def test_it_stays_what_the_policy_was(
        self, lora: tuple[str, ...], new_model: Fixture, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
    ) -> None:
        actor = new_actor("actor.use_kl_loss=true", "actor.optim.lr=0.01", "actor.ppo_mini_batch_size=2", *lora)
        branches = branches_of(new_groups(2, 2))
        before = actor.log_probs(branches).logp
        for _ in range(2):
            actor.update(batch_of(new_groups(2, 3)))
        assert (actor.log_probs(branches).logp - before).abs().max() > 1e-3
        torch.testing.assert_close(actor._policy.reference_logp(branches), before, atol=1e-5, rtol=0)
        assert (actor._policy._reference is None) is bool(lora), "adapters need no second copy"

    def test_the_kl_term_pulls_the_policy_back(
        self, new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture, batch_of: Fixture
    ) -> None:
        groups = sampled_by(new_model(), new_groups(2, 3))
        branches = branches_of(groups)
        keys = ("actor.optim.lr=0.003", "actor.ppo_mini_batch_size=2")
        free = new_actor(*keys)
        held = new_actor(*keys, "actor.use_kl_loss=true", "actor.kl_loss_coef=3", "actor.kl_loss_type=k2")
        start = free.log_probs(branches).logp
        for _ in range(8):
            free.update(batch_of(groups))
            row = held.update(batch_of(groups))
        distance = [(actor.log_probs(branches).logp - start).square().mean().item() for actor in (free, held)]
        assert distance[1] < 0.5 * distance[0]
        assert row["actor/kl_loss"] > 0 and held.forwards["reference"] == 8

    def test_the_kl_term_does_not_depend_on_micro_batches(
        self,
        new_model: Fixture,
        new_actor: Fixture,
        new_groups: Fixture,
        sampled_by: Fixture,
        batch_of: Fixture,
        gradients_of: Fixture,
    ) -> None:
        groups = sampled_by(new_model(seed=1), new_groups(2, 3))
        keys = (
            "actor.use_kl_loss=true",
            "actor.kl_loss_coef=1",
            "actor.entropy_coeff=0.1",
            "actor.ppo_mini_batch_size=2",
            *LORA,
        )
        results = []
        for limit in (40, 100_000):
            actor = new_actor(*keys, f"actor.ppo_max_token_len_per_gpu={limit}")
            for parameter in actor.model.parameters():
                if parameter.requires_grad:
                    torch.nn.init.constant_(parameter, 0.02)
            results.append(gradients_of(actor, batch_of(groups)))
        (parts, row), (whole, expected) = results
        assert_gradients_agree(parts[0], whole[0], rtol=1e-4, atol=1e-5)
        assert row["actor/kl_loss"] == pytest.approx(expected["actor/kl_loss"], rel=1e-4)
        assert expected["actor/kl_loss"] > 0


def test_an_entropy_bonus_flattens_the_policy(
    new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture, batch_of: Fixture
) -> None:
    groups = sampled_by(new_model(), new_groups(2, 3))
    entropies = []
    for coefficient in (0.0, 1.0):
        keys = [f"actor.entropy_coeff={coefficient}"] if coefficient else []
        actor = new_actor("actor.optim.lr=0.003", "actor.ppo_mini_batch_size=2", *keys)
        for _ in range(5):
            row = actor.update(batch_of(groups))
        entropies.append(row["actor/entropy"])
    assert entropies[1] > entropies[0] + 0.05


@pytest.mark.parametrize("term", ["actor.use_kl_loss=true", "actor.entropy_coeff=0.1"])
def test_what_is_rejected_trains_no_other_term(
    term: str, new_model: Fixture, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    reject = "algorithm.rollout_correction={rollout_rs: [token_k1], rollout_rs_threshold: [[0.999999999, 1]]}"
    actor = new_actor(term, reject, "actor.ppo_mini_batch_size=2")
    row = actor.update(batch_of(new_groups(2, 3)))
    assert row["mismatch/rejected_fraction"] == 1 and row["actor/skipped_steps"] == 1


def test_a_reference_policy_or_critic_that_is_missing_is_an_error(new_model: Fixture, new_config: Fixture) -> None:
    for key, what in (("actor.use_kl_loss=true", "reference"), ("algorithm.adv_estimator=gae", "critic")):
        with pytest.raises(ValueError, match=what):
            Actor(new_config(key), new_model(), total_optimiser_steps=None)


class TestLora:
    def test_only_adapters_are_trained(self, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture) -> None:
        actor = new_actor(*LORA, "actor.optim.lr=0.01", "actor.ppo_mini_batch_size=2")
        before = {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}
        actor.update(batch_of(new_groups(2, 3)))
        changed = {
            name for name, parameter in actor.model.named_parameters() if not torch.equal(parameter, before[name])
        }
        assert changed and all("lora_" in name for name in changed)
        assert not any("lm_head" in name for name in before if "lora_" in name)

    @pytest.mark.parametrize("family", ["qwen3", "llama"])
    def test_engines_get_the_merged_weights_under_the_models_own_names(
        self,
        family: str,
        tmp_path: Path,
        new_model: Fixture,
        new_actor: Fixture,
        new_groups: Fixture,
        batch_of: Fixture,
    ) -> None:
        actor = new_actor(*LORA, "actor.optim.lr=0.01", "actor.ppo_mini_batch_size=2", family=family)
        for _ in range(3):
            actor.update(batch_of(new_groups(2, 3)))
        plain = new_model(family)
        tensors = dict(actor.named_tensors())
        assert tensors.keys() == dict(plain.named_parameters()).keys()
        plain.load_state_dict(tensors, strict=False)
        branches = branches_of(new_groups(2, 2))
        from agentrl.trainer.policy_model import PolicyModel

        merged = PolicyModel(plain, "float32").statistics(branches).logp
        torch.testing.assert_close(merged, actor.log_probs(branches).logp, atol=1e-4, rtol=0)
        write_policy(actor.model, snapshot(actor.model), tmp_path / "model")
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        for name, parameter in loaded.named_parameters():
            torch.testing.assert_close(parameter, tensors[name])

    def test_adapters_are_saved_as_peft_reads_them(
        self, tmp_path: Path, new_model: Fixture, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
    ) -> None:
        from peft import PeftModel

        actor = new_actor(*LORA, "actor.optim.lr=0.01", "actor.ppo_mini_batch_size=2")
        actor.update(batch_of(new_groups(2, 3)))
        write_adapter(actor.model, tmp_path / "adapter")
        loaded: Any = PeftModel.from_pretrained(new_model(), str(tmp_path / "adapter"))
        ids = torch.arange(20)[None]
        plain = copy.deepcopy(actor.model)
        plain.set_attn_implementation("sdpa")
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)
            assert not torch.allclose(loaded(input_ids=ids).logits, new_model()(input_ids=ids).logits)

    @pytest.mark.parametrize("targets", ["[attention_projection]", "[q_proj, attention_projection]"])
    def test_a_target_that_no_layer_is_called_is_an_error(self, targets: str, new_actor: Fixture) -> None:
        said = r"model\.target_modules: the model has no layer attention_projection: .*q_proj, k_proj"
        with pytest.raises(ValueError, match=said):
            new_actor(*LORA, f"model.target_modules={targets}")

    @pytest.mark.parametrize(
        ("targets", "said"),
        [
            ("[query]", "the model has no layer query"),
            ("[norm]", "is not supported"),
            ("[lm_head]", "share their weights"),
        ],
    )
    def test_that_is_known_before_any_weight_is_loaded(self, targets: str, said: str, new_config: Fixture) -> None:
        config = new_config(*LORA, f"model.target_modules={targets}").model
        with pytest.raises(ValueError, match=rf"model\.target_modules: .*{said}"):
            check_lora(config, str(tiny_model_path()))
        check_lora(new_config(*LORA).model, str(tiny_model_path()))

    @pytest.mark.parametrize("targets", ["[lm_head]", "[embed_tokens, q_proj]"])
    def test_layers_that_share_their_weights_are_refused(self, targets: str, new_actor: Fixture) -> None:
        with pytest.raises(ValueError, match=r"model\.target_modules: .*embed_tokens.* share"):
            new_actor(*LORA, f"model.target_modules={targets}")
        new_actor(*LORA, "model.target_modules=[lm_head]", family="llama")

    def test_all_linear_may_stand_in_a_list_as_in_areal(self, new_config: Fixture) -> None:
        assert new_config(*LORA, "model.target_modules=[all-linear]").model.target_modules == "all-linear"

    def test_chosen_layers_alone_get_adapters(self, new_actor: Fixture) -> None:
        actor = new_actor(*LORA, "model.target_modules=[q_proj, v_proj]")
        names = {
            name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in actor.model.named_parameters() if "lora_" in name
        }
        assert names == {"q_proj", "v_proj"}


class TestAnchors:
    def batches(self, new_groups: Fixture, versions: list[int]) -> list[Batch]:
        return [Batch(number, version, new_groups(2, 3, seed=number)) for number, version in enumerate(versions)]

    @pytest.mark.parametrize("lora", [(), LORA], ids=["whole model", "adapters"])
    def test_the_anchor_of_a_publication_outlives_training_steps(
        self, lora: tuple[str, ...], new_actor: Fixture, new_groups: Fixture
    ) -> None:
        keys = (
            *lora,
            "async_training.trigger_parameter_sync_step=2",
            "actor.prox_anchor=publish",
            "actor.optim.lr=0.01",
            "actor.ppo_mini_batch_size=2",
        )
        actor = new_actor(*keys)
        ratios = [actor.update(batch)["actor/ratio_mean"] for batch in self.batches(new_groups, [0, 0, 1, 1])]
        assert ratios[0] == pytest.approx(1, abs=1e-5) and ratios[2] == pytest.approx(1, abs=1e-5)
        assert abs(ratios[1] - 1) > 1e-3 and abs(ratios[3] - 1) > 1e-3
        at_step = new_actor(*(key for key in keys if "anchor" not in key))
        for batch in self.batches(new_groups, [0, 0, 1]):
            assert at_step.update(batch)["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)

    def test_looking_back_leaves_the_weights_alone(self, new_actor: Fixture, new_groups: Fixture) -> None:
        actor = new_actor(
            "async_training.trigger_parameter_sync_step=2", "actor.prox_anchor=publish", "actor.optim.lr=0.01"
        )
        first, second = self.batches(new_groups, [0, 0])
        actor.update(first)
        kept = copy.deepcopy(actor.model)
        with actor._anchor.in_place():
            assert any(not torch.equal(a, b) for a, b in zip(actor.model.parameters(), kept.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(actor.model.parameters(), kept.parameters(), strict=True))
        actor.update(second)

    @pytest.mark.parametrize(
        ("anchor", "proximal"), [("step", [4.0, 4.0, 4.5, 4.5]), ("publish", [4.0, 4.0, 4.0, 4.0])]
    )
    def test_loglinear_is_given_the_real_versions(
        self,
        anchor: str,
        proximal: list[float],
        new_actor: Fixture,
        new_groups: Fixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from agentrl.trainer import actor as actor_module

        seen: list[tuple[float, float]] = []
        original = actor_module.proximal_logp

        def keep(*args: Any, **kwargs: Any) -> Any:
            seen.append((kwargs["version_prox"], kwargs["version_now"]))
            return original(*args, **kwargs)

        monkeypatch.setattr(actor_module, "proximal_logp", keep)
        keys = [
            "actor.proximal=loglinear",
            "async_training.trigger_parameter_sync_step=2",
            "async_training.require_batches=2",
            "actor.ppo_mini_batch_size=1",
        ]
        actor = new_actor(*keys, f"actor.prox_anchor={anchor}")
        for batch in self.batches(new_groups, [4, 4]):
            actor.update(batch)
        assert seen == list(zip(proximal, [4.0, 4.25, 4.5, 4.75], strict=True))

    def test_loglinear_is_the_current_policy_where_nothing_has_moved(
        self, new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture
    ) -> None:
        groups = sampled_by(new_model(seed=3), new_groups(2, 3))
        row = new_actor("actor.proximal=loglinear", "actor.ppo_mini_batch_size=2").update(Batch(0, 1, groups))
        assert row["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert row["mismatch/max"] > 0.1


ESTIMATORS = {
    "gae": (),
    "gdpo": ("algorithm.gdpo_reward_keys=[answer, format]",),
    "gpg": (),
    "grpo_passk": (),
    "opo": (),
    "remax": (),
    "optimal_token_baseline": (),
    "tir_optimal_token_baseline": (),
}
LOSSES = {
    "gspo": ("actor.loss_agg_mode=seq-mean-token-mean",),
    "sapo": ("actor.loss_agg_mode=seq-mean-token-mean",),
    "geo_mean": (),
    "cispo": (),
    "dppo_tv": (),
    "dppo_kl": (),
    "gpg": (),
    "dro": ("actor.dro_beta=0.1",),
    "clip_cov": (),
    "kl_cov": (),
}


@pytest.mark.parametrize(
    "keys",
    [
        *((f"algorithm.adv_estimator={name}", *keys) for name, keys in ESTIMATORS.items()),
        *((f"actor.loss_mode={name}", *keys) for name, keys in LOSSES.items()),
        *((f"actor.loss_mode={name}", BYPASS, *keys) for name, keys in LOSSES.items() if name != "gpg"),
        *((f"actor.loss_mode={name}", "actor.proximal=loglinear", *keys) for name, keys in LOSSES.items()),
        ("algorithm.branch_weighting=token",),
        ("algorithm.rollout_correction.m2_threshold=0.04",),
    ],
    ids=lambda keys: "+".join(key.split("=")[-1] for key in keys),
)
def test_every_method_trains_whatever_the_micro_batches(
    keys: tuple[str, ...],
    new_model: Fixture,
    new_actor: Fixture,
    new_groups: Fixture,
    sampled_by: Fixture,
    batch_of: Fixture,
    gradients_of: Fixture,
) -> None:
    groups = sampled_by(new_model(), new_groups(2, 3), noise=0.1)
    for number, group in enumerate(groups):
        group.greedy = copy.deepcopy(group.trajectories[0])
        group.greedy.reward = 0.25 * number
        for member, trajectory in enumerate(group.trajectories):
            trajectory.reward_parts = {"answer": float(member == 0), "format": float(member)}
    base = ("actor.ppo_mini_batch_size=2", *keys)
    (whole,), row = gradients_of(new_actor(*base), batch_of(groups))
    assert largest(whole) > 0 and np.isfinite(row["actor/loss"])
    if "_cov" not in keys[0]:
        (parts,), _ = gradients_of(new_actor(*base, "actor.ppo_max_token_len_per_gpu=40"), batch_of(groups))
        assert_gradients_agree(parts, whole, atol=2e-5)
