"""Two processes, each with its own share of the sequences, have the loss and gradients of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl.algorithm import (
    Correction,
    Layout,
    LossConfig,
    Totals,
    branch_weights,
    merge,
    policy_loss,
    summarise,
    value_loss,
)
from agentrl.algorithm.aggregate import AGGREGATIONS

ROWS, LENGTH, SEEDS = 7, 9, range(5)
LOSSES = ("vanilla", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg", "dro", "bypass_mode")


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values `[5, ROWS, LENGTH]`, mask, the mask after rejection, and episodes, which lie on one rank."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5, ROWS, LENGTH, generator=generator, dtype=torch.float64)
    mask = (torch.rand(ROWS, LENGTH, generator=generator) > 0.4).double()
    kept = mask * (torch.rand(ROWS, LENGTH, generator=generator) > 0.3)
    return values, mask, kept, torch.tensor([0, 0, 1, 2, 2, 2, 3])


def cases() -> list[tuple[str, str]]:
    sequences = ("gspo", "sapo")
    return [("vanilla", mode) for mode in AGGREGATIONS.names()] + [
        (loss, "seq-mean-token-mean" if loss in sequences else "token-mean") for loss in LOSSES[1:]
    ]


def shares(seed: int, rows: slice, totals: Totals | None) -> tuple[dict[str, Any], Totals]:
    """Loss, gradient and metrics of every case on some rows, and what those rows count."""
    values, mask, kept, episode = (part[..., rows, :] if part.dim() > 1 else part[rows] for part in problem(seed))
    plain = Layout.rows(mask, episode=episode)
    weights = branch_weights("token", mask, plain)
    layout = Layout(plain.sequence, plain.episode, plain.group, weight=weights)
    results: dict[str, Any] = {}
    for loss_mode, aggregation in cases():
        logp = values[0].clone().requires_grad_()
        scale = 5.0 if aggregation == "seq-mean-token-sum-norm" else None
        loss, metrics = policy_loss(
            loss_mode,
            logp=logp,
            prox_logp=values[0] + 0.2 * values[1],
            behav_logp=values[2],
            advantages=values[3],
            mask=mask,
            config=LossConfig(loss_agg_mode=aggregation, loss_scale_factor=scale, dro_beta=0.5),
            layout=layout,
            correction=Correction(values[4].exp(), kept, {}),
            totals=totals,
        )
        loss.backward()
        results[f"{seed} {loss_mode} {aggregation}"] = (loss.detach(), logp.grad, metrics)
    predicted = values[0].clone().requires_grad_()
    loss, metrics = value_loss(
        values=predicted,
        old_values=values[1],
        returns=values[2],
        mask=mask,
        cliprange_value=0.5,
        layout=layout,
        totals=totals,
    )
    loss.backward()
    results[f"{seed} value"] = (loss.detach(), predicted.grad, metrics)
    return results, Totals.count(mask, layout)


def work(rank: int, folder: Path) -> None:
    """One rank; the first writes what all have found together to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    rows = slice(0, 3) if rank == 0 else slice(3, ROWS)
    found: dict[str, Any] = {}
    for seed in SEEDS:
        _, own = shares(seed, rows, None)
        counts = torch.tensor([float(own.tokens), float(own.sequences), float(own.episodes)], dtype=torch.float64)
        dist.all_reduce(counts)
        found |= shares(seed, rows, Totals(*counts))[0]
    summed: dict[str, Any] = {}
    for name, (loss, gradient, metrics) in found.items():
        whole = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
        whole[rows] = gradient
        pairs = torch.stack([torch.stack([a.double(), b.double()]) for a, b in metrics.values()])
        for tensor in (loss, whole, pairs):
            dist.all_reduce(tensor)
        summed[name] = (loss.tolist(), whole.tolist(), dict(zip(metrics, pairs.tolist(), strict=True)))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(summed))
    dist.destroy_process_group()


def test_two_ranks_are_one(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = json.loads((tmp_path / "found.json").read_text())
    expected: dict[str, Any] = {}
    for seed in SEEDS:
        _, totals = shares(seed, slice(0, ROWS), None)
        expected |= shares(seed, slice(0, ROWS), totals)[0]
    assert found.keys() == expected.keys()
    for name, (loss, gradient, metrics) in expected.items():
        assert found[name][0] == pytest.approx(loss.item(), rel=1e-7), name  # shares of branches are single precision
        torch.testing.assert_close(torch.tensor(found[name][1], dtype=torch.float64), gradient, rtol=1e-7, atol=1e-12)
        averages = {key: total / count for key, (total, count) in found[name][2].items()}
        assert averages == pytest.approx(summarise(merge([metrics])), rel=1e-6), name


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
