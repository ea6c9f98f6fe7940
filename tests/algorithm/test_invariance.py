"""Loss and gradient do not depend on micro-batching, padding or packing, order, or sharding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithm import (
    AdvantageConfig,
    Layout,
    LossConfig,
    RolloutCorrectionConfig,
    Totals,
    compute_advantages,
    policy_loss,
    rollout_correction,
    value_loss,
)
from agentrl.algorithm.aggregate import AGGREGATIONS
from agentrl.config.names import ADV_ESTIMATORS, CHOOSE_TOKENS, LOSS_MODES, SEQUENCE_MEANS

JUNK = (torch.nan, torch.inf, -torch.inf, -200.0, 7.0)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
AGGREGATED = [("vanilla", mode) for mode in AGGREGATIONS.names()] + [
    (loss, "seq-mean-token-mean" if loss in SEQUENCE_MEANS else "token-mean")
    for loss in (*LOSS_MODES, "value")
    if loss not in ("vanilla", *CHOOSE_TOKENS)
]
"""Every loss, and every aggregation, with the exception that the documentation names."""


@dataclass
class Sequence:
    """One sequence, unpadded: its per-token values [4, length] (logp, prox, behav, reward), mask and owners."""

    values: torch.Tensor
    mask: list[int]
    episode: int
    group: int
    episode_tokens: int
    weight: float


@st.composite
def sequences(draw: st.DrawFn, dtype: torch.dtype) -> list[Sequence]:
    """Up to seven sequences of up to four episodes in two groups, some without a trained token."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7))
    episodes = [draw(st.integers(0, 3)) for _ in masks]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    tokens = {e: sum(sum(m) for m, owner in zip(masks, episodes, strict=True) if owner == e) for e in episodes}
    return [
        Sequence(torch.randn(4, len(mask), generator=generator).to(dtype), mask, e, e % 2, tokens[e], 0.25 * (1 + e))
        for mask, e in zip(masks, episodes, strict=True)
    ]


@dataclass
class Batch:
    """Sequences laid out in rows, and where each of their tokens lies."""

    values: torch.Tensor
    mask: torch.Tensor
    layout: Layout
    places: list[tuple[int, int]]

    def read(self, tensor: torch.Tensor, items: list[Sequence]) -> list[torch.Tensor]:
        """A per-token result, sequence by sequence."""
        return [
            tensor[row, start : start + len(item.mask)] for (row, start), item in zip(self.places, items, strict=True)
        ]


def lay_out(items: list[Sequence], rows: list[int], gap: int = 0) -> Batch:
    """Puts each sequence at the end of its row, after `gap` positions of junk; the same for what stays empty."""
    ends = [0] * (max(rows, default=0) + 1)
    places = []
    for item, row in zip(items, rows, strict=True):
        places.append((row, ends[row] + gap))
        ends[row] += gap + len(item.mask)
    shape = (len(ends), max(max(ends), 1) + gap)
    junk = torch.tensor(JUNK, dtype=items[0].values.dtype)
    values = junk[torch.arange(4 * shape[0] * shape[1]) % len(JUNK)].view(4, *shape).clone()
    mask, sequence = torch.zeros(shape), torch.full(shape, -3)
    for index, (item, (row, start)) in enumerate(zip(items, places, strict=True)):
        span = slice(start, start + len(item.mask))
        trained = torch.tensor(item.mask)
        values[:, row, span] = torch.where(trained > 0, item.values, values[:, row, span])
        mask[row, span] = trained.float()
        sequence[row, span] = torch.where(trained > 0, index, sequence[row, span])
    layout = Layout(
        sequence,
        torch.tensor([item.episode for item in items]),
        torch.tensor([item.group for item in items]),
        episode_tokens=torch.tensor([item.episode_tokens for item in items]),
        weight=torch.tensor([item.weight for item in items]),
    )
    return Batch(values, mask, layout, places)


def padded(items: list[Sequence]) -> Batch:
    return lay_out(items, list(range(len(items))))


def loss_and_gradients(
    batch: Batch, items: list[Sequence], mode: str, totals: Totals, kind: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The share of the loss and d loss / d logp of each sequence; the reward stands in for the advantage."""
    logp, prox, behav, advantages = batch.values
    logp = logp.clone().requires_grad_()
    if kind == "value":
        loss, _ = value_loss(
            values=logp,
            old_values=prox,
            returns=advantages,
            mask=batch.mask,
            cliprange_value=0.5,
            loss_agg_mode=mode,
            layout=batch.layout,
            totals=totals,
        )
        loss.backward()
        assert logp.grad is not None
        return loss.detach(), batch.read(logp.grad, items)
    config = RolloutCorrectionConfig.model_validate(
        {"rollout_is": "sequence", "rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": [[0.2, 6.0], 1.5]}
    )
    correction = rollout_correction(
        prox_logp=logp if kind == "reinforce" else prox,
        behav_logp=behav,
        mask=batch.mask,
        config=config,
        layout=batch.layout,
    )
    loss, _ = policy_loss(
        "bypass_mode" if kind == "reinforce" else kind,
        logp=logp,
        prox_logp=prox,
        behav_logp=behav,
        advantages=advantages,
        mask=batch.mask,
        config=LossConfig(
            loss_agg_mode=mode,
            loss_scale_factor=5.0 if mode == "seq-mean-token-sum-norm" else None,
            loss_type="reinforce" if kind == "reinforce" else "ppo_clip",
            dro_beta=0.5,
        ),
        layout=batch.layout,
        correction=correction,
        totals=totals,
    )
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), batch.read(logp.grad, items)


def assert_same(actual, expected, dtype: torch.dtype) -> None:
    """Relative to the largest term: a sum of terms that cancel has no relative accuracy of its own."""
    scale = max([1.0, *(g.abs().max().item() for g in expected[1])])
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=tolerance)
    for got, wanted in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "mode"), AGGREGATED)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_loss_is_one_number(dtype, kind, mode, data):
    items = data.draw(sequences(dtype))
    if kind == "bypass_mode":
        kind = data.draw(st.sampled_from(["bypass_mode", "reinforce"]))
    whole = padded(items)
    totals = Totals.count(whole.mask, whole.layout)
    expected = loss_and_gradients(whole, items, mode, totals, kind)

    # Packing: any sequences in any row, with junk between them.
    rows = [data.draw(st.integers(0, 2)) for _ in items]
    packed = lay_out(items, rows, gap=data.draw(st.integers(0, 2)))
    assert_same(loss_and_gradients(packed, items, mode, totals, kind), expected, dtype)

    # Order: a permutation of the sequences permutes the gradients.
    order = data.draw(st.permutations(range(len(items))))
    shuffled = [items[index] for index in order]
    loss, gradients = loss_and_gradients(padded(shuffled), shuffled, mode, totals, kind)
    assert_same((loss, [gradients[order.index(index)] for index in range(len(items))]), expected, dtype)

    # Micro-batches and ranks: shares of any split add up, whatever layout each of them has.
    owner = [data.draw(st.integers(0, 2)) for _ in items]
    loss, split_gradients = torch.zeros((), dtype=dtype), {}
    for part in range(3):
        indices = [index for index in range(len(items)) if owner[index] == part]
        if not indices:
            continue
        members = [items[index] for index in indices]
        batch = lay_out(members, [0] * len(members)) if part == 1 else padded(members)
        share, part_gradients = loss_and_gradients(batch, members, mode, totals, kind)
        loss = loss + share
        split_gradients.update(zip(indices, part_gradients, strict=True))
    assert_same((loss, [split_gradients[index] for index in range(len(items))]), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("estimator", [*ADV_ESTIMATORS, "gae over turns"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_advantages_do_not_depend_on_layout_or_order(dtype, estimator, data):
    name, _, turns = estimator.partition(" over ")
    items = data.draw(sequences(dtype))
    order = data.draw(st.permutations(range(len(items))))
    shuffled = [items[index] for index in order]
    rows = [data.draw(st.integers(0, 2)) for _ in items]

    def advantages(batch: Batch, members: list[Sequence]) -> list[torch.Tensor]:
        first, second, third, rewards = batch.values
        result, _ = compute_advantages(
            name,
            token_rewards=rewards,
            mask=batch.mask,
            layout=batch.layout,
            config=AdvantageConfig(gamma=0.9, lam=0.8, gae_timestep="turn" if turns else "token"),
            values=first,
            logp=-second.abs(),
            sum_pi_squared=third.sigmoid(),
            baselines=batch.layout.group.to(dtype),
            reward_parts={"answer": first, "format": rewards},
        )
        assert not result[batch.mask == 0].any()
        return batch.read(result, members)

    expected = advantages(padded(items), items)
    for got, wanted in zip(advantages(lay_out(items, rows, gap=1), items), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for index, got in zip(order, advantages(padded(shuffled), shuffled), strict=True):
        torch.testing.assert_close(got, expected[index], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
