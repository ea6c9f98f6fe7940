"""How much faster is asynchronous training, and is it as good? Prints one JSON object a run, then the comparison.

    python benchmarks/async_speedup.py --rounds 3 --steps 14

The same training (`examples/math.yaml`) synchronously (staleness 0: a batch is generated, then trained on) and
asynchronously (bound 4, partial rollouts), taking turns, with the published tool latency of `slow_tools.py` and with
none. The synchronous runs use the best of several batch sizes and concurrencies, found first, by episodes per second.

* `steps/s ratio`: trained episodes per second, asynchronous over synchronous, divided by the episodes of a step.
* `share of the bound`: no schedule beats max(generation, training). Of each asynchronous run: the busier side's
  computing time over the whole time.
* `long episodes`: their share among the trained, and among the dispatched.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from slow_tools import long_share

from agentrl.config import load_config
from agentrl.run import run

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"
WARM_UP = 2
"""First steps, left out of all rates: processes start, the first batch has nothing to overlap with."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One training."""

    mode: str
    latency: bool
    groups: int
    concurrent: int
    steps: int
    seconds_per_step: float
    episodes_per_second: float
    generation_share: float
    training_share: float
    lag_max: float
    trained: int
    dispatched: int
    long_trained: float | None
    long_dispatched: float | None
    accuracy_before: float | None
    accuracy_after: float | None

    @property
    def share_of_bound(self) -> float:
        return max(self.generation_share, self.training_share)


def measure(mode: str, *, latency: bool, steps: int, groups: int, concurrent: int, seed: int) -> Measured:
    """One training of `steps` steps; `groups` groups of 8 a step, in two optimiser steps."""
    synchronous = mode == "synchronous"
    overrides = [
        f"rollout.max_head_offpolicyness={0 if synchronous else 4}",
        f"rollout.max_concurrent={concurrent}",
        f"rollout.max_batch_size={min(concurrent, 128)}",
        f"actor.ppo_mini_batch_size={groups // 2}",
        f"trainer.total_steps={steps}",
        f"data.seed={seed}",
        "val.limit=256",
        f"trainer.experiment_name=speedup-{mode}",
    ]
    if latency:
        overrides.append("env.cls=slow_tools:SlowArithmeticEnv")
    folder = str(Path(__file__).parent)  # where the run's processes find slow_tools
    result = run(load_config(CONFIG, overrides), plugin_folders=[folder], console=Console(stderr=True))
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]
    counted = rows[WARM_UP:]
    seconds = statistics.fmean(row["time/step"] for row in counted)
    trained = result.fates.get("trained", 0)
    return Measured(
        mode=mode,
        latency=latency,
        groups=groups,
        concurrent=concurrent,
        steps=len(rows),
        seconds_per_step=round(seconds, 3),
        episodes_per_second=round(groups * 8 / seconds, 2),
        generation_share=round(1 - statistics.fmean(row["idle/engine"] for row in counted), 3),
        training_share=round(1 - statistics.fmean(row["idle/trainer"] for row in counted), 3),
        lag_max=max(row["staleness/lag_max"] for row in rows),
        trained=trained,
        dispatched=result.dispatched,
        long_trained=_mean(rows, "reward/parts/long") if latency else None,
        long_dispatched=round(long_share(result.dispatched), 4) if latency else None,
        accuracy_before=result.accuracy_before,
        accuracy_after=result.accuracy_after,
    )


def compare(synchronous: list[Measured], asynchronous: list[Measured]) -> dict[str, object]:
    """The figures of interleaved runs, medians with their range over the rounds."""
    ratios = [
        fast.episodes_per_second / slow.episodes_per_second
        for slow, fast in zip(synchronous, asynchronous, strict=True)
    ]
    return {
        "latency": synchronous[0].latency,
        "rounds": len(ratios),
        "steps/s ratio": _spread(ratios),
        "share of the bound": _spread([run.share_of_bound for run in asynchronous]),
        "lag_max": max(run.lag_max for run in asynchronous),
        "long episodes, trained": _optional([run.long_trained for run in asynchronous]),
        "long episodes, dispatched": _optional([run.long_dispatched for run in asynchronous]),
        "accuracy, synchronous": _optional([run.accuracy_after for run in synchronous]),
        "accuracy, asynchronous": _optional([run.accuracy_after for run in asynchronous]),
    }


def _mean(rows: list[dict[str, float]], key: str) -> float:
    return round(statistics.fmean(row[key] for row in rows), 4)


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def _optional(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return _spread(known) if known else None


def _show(row: object) -> None:
    print(json.dumps(row), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--search-steps", type=int, default=6, help="of each candidate for the synchronous side")
    parser.add_argument("--latency", choices=("with", "without", "both"), default="both")
    arguments = parser.parse_args()
    for latency in {"with": (True,), "without": (False,), "both": (True, False)}[arguments.latency]:
        candidates = [
            measure("synchronous", latency=latency, steps=arguments.search_steps, groups=groups, concurrent=n, seed=0)
            for groups, n in ((16, 64), (16, 128), (32, 128), (32, 256))
        ]
        best = max(candidates, key=lambda run: run.episodes_per_second)
        _show({"synchronous candidates": [asdict(run) for run in candidates], "best": [best.groups, best.concurrent]})
        runs: dict[str, list[Measured]] = {"synchronous": [], "asynchronous": []}
        for seed in range(arguments.rounds):
            for mode, groups, n in (("synchronous", best.groups, best.concurrent), ("asynchronous", 16, 128)):
                steps = arguments.steps * 16 // groups
                measured = measure(mode, latency=latency, steps=steps, groups=groups, concurrent=n, seed=seed)
                runs[mode].append(measured)
                _show(asdict(measured))
        _show(compare(runs["synchronous"], runs["asynchronous"]))


if __name__ == "__main__":
    main()
