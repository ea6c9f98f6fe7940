"""One training step: what is computed, what moves, and what must not."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.torch_engine import TorchEngine
from agentrl.observe import STEP_KEYS
from agentrl.record import Batch, Branch, Group, Turn
from agentrl.record.protocols import GenerateRequest, GenerateResult
from agentrl.trainer.policy_files import snapshot, write_policy
from tests.support.gradients import assert_gradients_agree, moved, weights_of

Fixture = Callable[..., Any]

BYPASS = "actor.proximal=bypass"
REINFORCE = "algorithm.rollout_correction.loss_type=reinforce"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_engine_agree_on_the_policy(
    family: str, temperature: float, new_model: Fixture, new_actor: Fixture
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(61, size=n).astype(np.int32) for n in (3, 30, 11)]

    async def play() -> list[GenerateResult]:
        engine = TorchEngine(new_model(family), max_batch_size=2, max_model_len=128)
        requests = [GenerateRequest(f"r{i}", p, 10 + 5 * i, temperature, (), i) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return results

    branches, recorded = [], []
    for ids, result in zip(prompts, asyncio.run(play()), strict=True):
        size, start = len(ids) + len(result.token_ids), len(ids)
        mask = (np.arange(size) >= start).astype(np.uint8)
        turn = Turn(start, size, temperature, "length")
        logprobs = np.concatenate([np.zeros(start, np.float32), result.logprobs])
        branches.append(Branch(np.concatenate([ids, result.token_ids]), mask, logprobs, mask - 1, [turn]))
        recorded.append(result.logprobs)
    logp = new_actor(family=family).log_probs(branches).logp
    np.testing.assert_allclose(logp[0].detach().numpy(), np.concatenate(recorded), atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.loss_agg_mode=seq-mean-token-mean"],
        ["actor.loss_agg_mode=seq-mean-token-sum", "algorithm.rollout_correction.rollout_is=sequence"],
        ["actor.loss_agg_mode=seq-mean-token-sum-norm"],
        ["actor.loss_agg_mode=episode-mean"],
        ["algorithm.rollout_correction.rollout_is_batch_normalize=true"],
        ["algorithm.rollout_correction={rollout_rs: [seq_mean_k1], rollout_rs_threshold: [[0.8, 1.25]]}"],
        [BYPASS],
        [BYPASS, REINFORCE],
        [BYPASS, REINFORCE, "algorithm.rollout_correction.rollout_is=sequence"],
    ],
    ids=lambda overrides: "+".join(o.split(".")[-1] for o in overrides) or "default",
)
def test_loss_and_gradients_do_not_depend_on_micro_batches(
    overrides: list[str],
    new_model: Fixture,
    new_actor: Fixture,
    new_groups: Fixture,
    sampled_by: Fixture,
    batch_of: Fixture,
    gradients_of: Fixture,
) -> None:
    groups = sampled_by(new_model(seed=0), new_groups(4, 3), noise=0.3)
    results = []
    for limit in (1, 40, 90, 100_000):
        actor = new_actor("actor.ppo_mini_batch_size=2", f"actor.ppo_max_token_len_per_gpu={limit}", *overrides)
        results.append(gradients_of(actor, batch_of(groups)))
    whole, row = results[-1]
    assert len(whole) == 2
    for gradients, other in results[:-1]:
        for mine, theirs in zip(gradients, whole, strict=True):
            assert_gradients_agree(mine, theirs)
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_gradients_do_not_depend_on_the_order_of_episodes(
    new_model: Fixture,
    new_actor: Fixture,
    new_groups: Fixture,
    sampled_by: Fixture,
    batch_of: Fixture,
    gradients_of: Fixture,
) -> None:
    groups = sampled_by(new_model(), new_groups(2, 4), noise=0.3)
    (first,), _ = gradients_of(new_actor("actor.ppo_mini_batch_size=2"), batch_of(groups))
    turned = [Group(g.id, g.trajectories[::-1], 0) for g in reversed(groups)]
    (second,), _ = gradients_of(new_actor("actor.ppo_mini_batch_size=2"), batch_of(turned))
    assert_gradients_agree(second, first)


@pytest.mark.parametrize(
    ("overrides", "forwards"),
    [
        ([], {"proximal": 1, "train": 1}),
        ([BYPASS], {"train": 1}),
        ([BYPASS, REINFORCE], {"train": 1}),
        (["actor.proximal=loglinear"], {"train": 1}),
        (["actor.use_kl_loss=true", "model.lora_rank=2"], {"proximal": 1, "reference": 1, "train": 1}),
        ([BYPASS, "algorithm.use_kl_in_reward=true", "model.lora_rank=2"], {"reference": 1, "train": 1}),
        (["actor.use_kl_loss=true"], {"proximal": 1, "reference": 1, "train": 1}),
        ([BYPASS, "algorithm.adv_estimator=gae"], {"train": 1, "values": 1, "critic": 1}),
    ],
)
def test_the_forwards_over_a_batch_are_those_of_the_proximal_policy(
    overrides: list[str], forwards: dict[str, int], new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor("actor.ppo_mini_batch_size=1", "actor.ppo_max_token_len_per_gpu=40", *overrides)
    tokens = 0

    def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal tokens
        tokens += kwargs["input_ids"].numel()

    reference, critic = actor._policy._reference, actor._critic
    others = [reference and reference._model, critic and critic.model.backbone]
    for model in (actor.model, *filter(None, others)):
        model.register_forward_pre_hook(count, with_kwargs=True)
    groups = new_groups(2, 3)
    row = actor.update(batch_of(groups))
    assert {**actor.forwards, **(critic.forwards if critic else {})} == forwards
    assert tokens == sum(forwards.values()) * row["tokens/packed"]


def test_the_proximal_policy_is_that_of_the_start_of_the_step(
    new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture, batch_of: Fixture
) -> None:
    groups = sampled_by(new_model(), new_groups(2, 3))
    one = new_actor("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01")
    row = one.update(batch_of(groups))
    assert row["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert row["mismatch/max"] < 1e-4
    two = new_actor("actor.ppo_mini_batch_size=1", "actor.optim.lr=0.01")
    row = two.update(batch_of(groups))
    assert abs(row["actor/ratio_mean"] - 1) > 1e-3  # the second optimiser step trains on the same old log-probs
    assert row["mismatch/max"] < 1e-4


@pytest.mark.parametrize("mode", [[], [BYPASS], ["actor.proximal=loglinear"]])
def test_what_engine_and_trainer_compute_differently_is_told_apart_from_staleness(
    mode: list[str], new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture
) -> None:
    """Half of the tokens were sampled by an older policy, far from this one; the others by this one."""
    groups = sampled_by(new_model(), new_groups(2, 3), noise=0.01)
    for group, version in zip(groups, (3, 2), strict=True):
        for branch in (branch for trajectory in group.trajectories for branch in trajectory.branches):
            branch.versions[branch.loss_mask == 1] = version
            branch.logprobs -= 0.5 * (version == 2)
    actor = new_actor("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01", *mode)
    row = actor.update(Batch(0, 3, groups))
    largest = row["mismatch/engine_max"]
    assert 0.005 < largest < 0.1
    assert 0 < row["mismatch/engine_k3"] <= largest**2
    # After an update no token is the current policy's own.
    assert "mismatch/engine_max" not in actor.update(Batch(0, 3, groups))
    if not mode:
        assert row["mismatch/max"] > 0.4 and row["mismatch/k3"] > 10 * row["mismatch/engine_k3"]


def test_the_context_gets_gradient_only_as_context(
    new_actor: Fixture, batch_of: Fixture, new_trajectory: Fixture, gradients_of: Fixture
) -> None:
    """Tokens behind the last trained one are read by nobody; the loss is of the trained tokens alone."""

    def batch(trained: list[int], tail: int, garbage: float) -> Any:
        ids = np.array([1, 2, 3, 4, 5, tail, tail], np.int32)
        mask = np.array([0, 0, *trained, 0, 0], np.uint8)
        logprobs = np.where(mask == 1, -1.0, garbage).astype(np.float32)
        branch = Branch(ids, mask, logprobs, np.where(mask, 0, -1), [Turn(2, 5, 1.0, "stop")])
        other = Branch(ids[:5] + 10, mask[:5], logprobs[:5], np.where(mask, 0, -1)[:5], [Turn(2, 5, 1.0, "stop")])
        return batch_of([Group("g", [new_trajectory([branch], 1.0), new_trajectory([other], 0.5)], 0)])

    actor = new_actor("actor.ppo_mini_batch_size=1", "algorithm.norm_adv_by_std_in_grpo=false", family="llama")
    (gradients,), _ = gradients_of(actor, batch([1, 0, 1], 50, 0.0))
    embedding = gradients["model.embed_tokens.weight"]
    assert (embedding[50] == 0).all() and (embedding[5] == 0).all()
    assert (embedding[1] != 0).any() and (embedding[4] != 0).any()
    for tail, garbage in ((7, 0.0), (50, float("nan")), (50, float("-inf")), (50, -200.0)):
        (same,), _ = gradients_of(actor, batch([1, 0, 1], tail, garbage))
        for name, gradient in gradients.items():
            assert torch.equal(same[name], gradient), (name, tail, garbage)


@pytest.mark.parametrize("proximal", ["recompute", "bypass"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    proximal: str, poison: float, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor(f"actor.proximal={proximal}", "actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01")
    healthy, groups = new_groups(2, 3), new_groups(2, 3)
    branch = groups[0].trajectories[0].branches[0]
    branch.logprobs[np.flatnonzero(branch.loss_mask)[0]] = poison
    before = weights_of(actor)
    row = actor.update(batch_of(groups))
    if np.isnan(poison):
        assert not moved(actor, before)
        assert row["actor/skipped_steps"] == row["actor/nonfinite_steps"] == 1 and row["actor/grad_norm"] == 0
    assert all(bool(parameter.isfinite().all()) for parameter in actor.model.parameters())
    row = actor.update(batch_of(healthy))
    assert moved(actor, before)
    assert row["actor/skipped_steps"] == 0 and row["actor/grad_norm"] > 0
    assert all(bool(parameter.isfinite().all()) for parameter in actor.model.parameters())


def test_only_the_poisoned_mini_batch_is_skipped(new_actor: Fixture, new_groups: Fixture, batch_of: Fixture) -> None:
    actor = new_actor("actor.ppo_mini_batch_size=1", "actor.optim.lr=0.01")
    groups = new_groups(2, 3)
    branch = groups[0].trajectories[0].branches[0]
    branch.logprobs[np.flatnonzero(branch.loss_mask)[0]] = np.nan
    before = weights_of(actor)
    assert actor.update(batch_of(groups))["actor/skipped_steps"] == 1
    assert moved(actor, before)


def test_a_weight_that_is_not_finite_skips_every_step(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor("actor.ppo_mini_batch_size=1")
    with torch.no_grad():
        actor.model.model.norm.weight[0] = float("inf")
    assert actor.update(batch_of(new_groups(2, 3)))["actor/skipped_steps"] == 2


def test_a_batch_without_advantages_moves_nothing(new_actor: Fixture, new_groups: Fixture, batch_of: Fixture) -> None:
    actor = new_actor("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01", "actor.optim.weight_decay=0.1")
    actor.update(batch_of(new_groups(2, 3)))  # momentum that would move the weights by itself
    before = weights_of(actor)
    groups = new_groups(2, 3)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward = 0.3
    row = actor.update(batch_of(groups))
    assert row["actor/skipped_steps"] == 1 and row["actor/loss"] == 0
    assert not moved(actor, before)


def test_a_batch_whose_tokens_are_all_rejected_moves_nothing(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    reject = "algorithm.rollout_correction={rollout_rs: [token_k1], rollout_rs_threshold: [[0.999999999, 1]]}"
    actor = new_actor("actor.ppo_mini_batch_size=2", reject)
    before = weights_of(actor)
    row = actor.update(batch_of(new_groups(2, 3)))
    assert row["actor/skipped_steps"] == 1 and row["actor/loss"] == 0 and row["actor/nonfinite_steps"] == 0
    assert row["mismatch/rejected_fraction"] == 1
    assert not moved(actor, before)
    assert {key for key in STEP_KEYS if key.startswith(("actor/", "mismatch/"))} <= row.keys()


def test_positive_advantages_make_their_tokens_more_likely(
    new_model: Fixture, new_actor: Fixture, new_groups: Fixture, sampled_by: Fixture, batch_of: Fixture
) -> None:
    groups = sampled_by(new_model(), new_groups(2, 3))
    actor = new_actor("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.003")
    good = [b for group in groups for b in group.trajectories[0].branches]
    bad = [b for group in groups for trajectory in group.trajectories[1:] for b in trajectory.branches]
    before = [actor.log_probs(branches).logp.mean().item() for branches in (good, bad)]
    actor.update(batch_of(groups))
    after = [actor.log_probs(branches).logp.mean().item() for branches in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


def test_the_learning_rate_in_the_row_is_the_one_that_was_used(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    schedule = ["actor.optim.lr=0.01", "actor.optim.lr_warmup_steps=1", "actor.optim.lr_scheduler_type=linear"]
    actor = new_actor("actor.ppo_mini_batch_size=2", *schedule, steps=3)
    rates = [actor.update(batch_of(new_groups(2, 3)))["actor/lr"] for _ in range(3)]
    assert rates == pytest.approx([0.005, 0.01, 0.005])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_saved_model_is_the_trained_one(
    family: str, tmp_path: Path, new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    actor = new_actor("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01", family=family)
    actor.update(batch_of(new_groups(2, 3)))
    write_policy(actor.model, snapshot(actor.model), tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(20)[None]
    plain = copy.deepcopy(actor.model)
    plain.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert "agentrl" not in (tmp_path / "model/config.json").read_text()
    assert actor.update(batch_of(new_groups(2, 3)))["actor/skipped_steps"] == 0  # training can go on


@pytest.mark.parametrize(("family", "head"), [("qwen3", False), ("llama", True)])
def test_tied_weights_are_published_once(family: str, head: bool, new_actor: Fixture) -> None:
    names = [name for name, _ in new_actor(family=family).named_tensors()]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is head


def test_in_bfloat16_the_trainer_keeps_its_weights_in_float32_and_publishes_bfloat16(
    new_actor: Fixture, new_groups: Fixture, batch_of: Fixture
) -> None:
    """At a learning rate of 1e-6 a bfloat16 weight would not move at all."""
    actor = new_actor("model.dtype=bfloat16", "actor.optim.lr=1e-6")
    before = {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}
    row = actor.update(batch_of(new_groups(2, 3)))
    assert row["actor/grad_norm"] > 0
    moved = [(parameter != before[name]).float().mean() for name, parameter in actor.model.named_parameters()]
    assert min(moved) > 0.5
    assert {tensor.dtype for _, tensor in actor.named_tensors()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_every_estimator_trains_in_every_type_whatever_the_micro_batches(
    estimator: str,
    dtype: str,
    new_model: Fixture,
    new_actor: Fixture,
    new_groups: Fixture,
    sampled_by: Fixture,
    batch_of: Fixture,
    gradients_of: Fixture,
) -> None:
    keys = [f"algorithm.adv_estimator={estimator}", f"model.dtype={dtype}", "actor.ppo_mini_batch_size=2"]
    groups = sampled_by(new_model(), new_groups(2, 3), noise=0.1)
    (whole,), row = gradients_of(new_actor(*keys), batch_of(groups))
    (parts,), _ = gradients_of(new_actor(*keys, "actor.ppo_max_token_len_per_gpu=40"), batch_of(groups))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert np.isfinite(row["actor/loss"])
    assert_gradients_agree(parts, whole, rtol=tolerance)
    actor = new_actor(*keys, "actor.optim.lr=0.01")
    before = weights_of(actor)
    actor.update(batch_of(groups))
    assert moved(actor, before)
