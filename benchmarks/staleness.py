"""Does the staleness bound hold, and do generation and training overlap? Prints one JSON object a bound.

    python benchmarks/staleness.py --bounds 0 1 4 --steps 12

For each `rollout.max_head_offpolicyness`: the largest lag trained on, the largest difference between rollout and
recomputed log-probs, the idle shares, and the tokens that the engine sampled while the trainer computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console

from agentrl import train

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"


def measure(bound: int, steps: int, overrides: list[str]) -> dict[str, object]:
    """One training under a bound."""
    result = train(
        CONFIG,
        [
            f"rollout.max_head_offpolicyness={bound}",
            f"trainer.total_steps={steps}",
            "trainer.val_before_train=false",
            "val.limit=64",
            f"trainer.experiment_name=staleness-{bound}",
            *overrides,
        ],
        console=Console(stderr=True),
    )
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]

    def mean(key: str) -> float:
        return round(statistics.fmean(row[key] for row in rows), 4)

    return {
        "bound": bound,
        "steps": len(rows),
        "staleness/lag_max": max(row["staleness/lag_max"] for row in rows),
        "staleness/lag_mean": mean("staleness/lag_mean"),
        "mismatch/max": max(row["mismatch/max"] for row in rows),
        "fates": result.fates,
        "dispatched": result.dispatched,
        "all accounted for": sum(result.fates.values()) == result.dispatched,
        "idle/trainer": mean("idle/trainer"),
        "idle/engine": mean("idle/engine"),
        "engine tokens during training": sum(row["overlap/engine_tokens"] for row in rows),
        "time/step": mean("time/step"),
        "time/publish": mean("time/publish"),
        "time/paused": mean("time/paused"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("overrides", nargs="*", help="further dotted.key=value")
    arguments = parser.parse_args()
    for bound in arguments.bounds:
        print(json.dumps(measure(bound, arguments.steps, arguments.overrides)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
