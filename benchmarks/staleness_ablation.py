"""How stale may data be, and what helps? Prints one JSON object a run, then a table; draws a plot.

    python benchmarks/staleness_ablation.py                       # 48 trainings, 43 minutes on two cores
    python benchmarks/staleness_ablation.py --lags 0 8 --seeds 0 --methods naive decoupled

The bundled model learns `examples/math.yaml` with every batch really trained at a lag of 0, 2, 4 or 8 policy versions:
generation is faster than training, so that the gate lets it run ahead by exactly its bound; the first batches, of which
no older version exists, are younger. Four updates:

* `naive`: the old policy is that of the start of the step (one more forward), and nobody asks who sampled the tokens.
* `decoupled`: the same, and each token weighs proximal / behaviour, truncated at 2.
* `bypass`: the ratio is current / behaviour, clipped. (The AReaL paper calls this naive PPO.)
* `bypass_rejection`: the same, without sequences whose mean k3 to the behaviour policy is above 0.01.

Accuracy is of the held-out tasks, sampled at temperature 1, after the last step; throughput is trained episodes a
second, without the first steps. The methods take turns within each seed and lag.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from rich.console import Console

from agentrl.config import load_config
from agentrl.run import run

matplotlib.use("Agg")

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"
CORRECTION = "algorithm.rollout_correction"
METHODS: dict[str, tuple[str, ...]] = {
    "naive": ("actor.proximal=recompute", f"{CORRECTION}={{rollout_is: null}}"),
    "decoupled": ("actor.proximal=recompute", f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: 2}}"),
    "bypass": ("actor.proximal=bypass", f"{CORRECTION}={{rollout_is: null}}"),
    "bypass_rejection": (
        "actor.proximal=bypass",
        f"{CORRECTION}={{rollout_is: null, rollout_rs: [seq_mean_k3], rollout_rs_threshold: [0.01]}}",
    ),
}
WARM_UP = 2
"""First steps, left out of the throughput."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One training. Lags are those of episodes, over all batches of which older versions existed, and of the lowest."""

    method: str
    lag: int
    seed: int
    accuracy: float
    best_reward: float
    lag_mean: float
    lag_mean_lowest: float
    episodes_per_second: float
    ratio_offset_max: float
    clip_fraction: float
    rejected_fraction: float
    seconds: float


def measure(method: str, lag: int, seed: int, *, steps: int, groups: int, lr: float) -> Measured:
    """One training at a forced lag."""
    overrides = [
        *METHODS[method],
        f"rollout.max_head_offpolicyness={lag}",
        f"actor.ppo_mini_batch_size={groups // 2}",
        "async_training.require_batches=2",
        f"actor.optim.lr={lr}",
        f"trainer.total_steps={steps}",
        f"trainer.experiment_name=ablation-{method}-{lag}",
        "trainer.val_before_train=false",
        "val.limit=256",
        f"data.seed={seed}",
    ]
    config = load_config(CONFIG, overrides)
    result = run(config, console=Console(stderr=True))
    if result.accuracy_after is None:
        raise RuntimeError(f"no held-out episode of {result.run_dir} was judged")
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]
    settled = rows[min(lag, len(rows) - 1) :]
    lags = [row["staleness/lag_mean"] for row in settled]
    seconds = statistics.fmean(row["time/step"] for row in rows[WARM_UP:])
    return Measured(
        method=method,
        lag=lag,
        seed=seed,
        accuracy=result.accuracy_after,
        best_reward=max(row["reward/mean"] for row in rows),
        lag_mean=round(statistics.fmean(lags), 3),
        lag_mean_lowest=round(min(lags), 3),
        episodes_per_second=round(groups * config.rollout.n / seconds, 2),
        ratio_offset_max=max(abs(row["actor/ratio_mean"] - 1) for row in rows),
        clip_fraction=statistics.fmean(row["actor/clip_fraction"] for row in settled),
        rejected_fraction=statistics.fmean(row["mismatch/rejected_fraction"] for row in settled),
        seconds=round(result.seconds, 1),
    )


def table(runs: Sequence[Measured], lags: Sequence[int], methods: Sequence[str]) -> str:
    """Held-out accuracy (median and range over seeds) and throughput, a line a method."""
    lines = [
        "| method | "
        + " | ".join(f"lag {lag}" for lag in lags)
        + " | episodes/s at "
        + ", ".join(map(str, lags))
        + " |",
        "|---|" + "---|" * (len(lags) + 1),
    ]
    for method in methods:
        cells, rates = [], []
        for lag in lags:
            own = [run for run in runs if (run.method, run.lag) == (method, lag)]
            accuracies = [run.accuracy for run in own]
            cells.append(f"{statistics.median(accuracies):.3f} ({min(accuracies):.3f} to {max(accuracies):.3f})")
            rates.append(f"{statistics.median(run.episodes_per_second for run in own):.0f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " | " + ", ".join(rates) + " |")
    return "\n".join(lines)


def plot(runs: Sequence[Measured], lags: Sequence[int], methods: Sequence[str], path: Path) -> None:
    """Accuracy and throughput over the lag; a line a method, a band over its seeds."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for method in methods:
        for axis, name in zip(axes, ("accuracy", "episodes_per_second"), strict=True):
            values = [[getattr(run, name) for run in runs if (run.method, run.lag) == (method, lag)] for lag in lags]
            axis.plot(lags, [statistics.median(own) for own in values], marker="o", label=method)
            axis.fill_between(lags, [min(own) for own in values], [max(own) for own in values], alpha=0.15)
    for axis, title in zip(axes, ("held-out accuracy", "trained episodes a second"), strict=True):
        axis.set(xlabel="lag of every batch, in policy versions", title=title, xticks=list(lags))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=16, help="of 8 episodes a training step, in two optimiser steps")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--plot", type=Path, default=Path("staleness_ablation.png"))
    arguments = parser.parse_args()
    runs: list[Measured] = []
    for seed in arguments.seeds:
        for lag in arguments.lags:
            for method in arguments.methods:
                size = {"steps": arguments.steps, "groups": arguments.groups, "lr": arguments.lr}
                runs.append(measure(method, lag, seed, **size))
                print(json.dumps(asdict(runs[-1])), flush=True)  # noqa: T201
    print(table(runs, arguments.lags, arguments.methods))  # noqa: T201
    plot(runs, arguments.lags, arguments.methods, arguments.plot)


if __name__ == "__main__":
    main()
