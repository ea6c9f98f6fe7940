"""Does it learn, and does it learn from the rewards? Prints one JSON object a run.

    python benchmarks/learning.py --seeds 0 1 2 --shuffled

Held-out accuracy at temperature 1 before and after `examples/math.yaml`, for several seeds, and the same with rewards
shuffled among the episodes, where it must stay flat.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from shuffled import ShuffledRewards

from agentrl import AgentLoop, RunResult, train

CONFIG = Path(__file__).parent.parent / "examples" / "math.yaml"


def measure(name: str, *overrides: str, loop: type[AgentLoop] | None = None) -> RunResult:
    """One training; prints what came out of it."""
    began = time.perf_counter()
    result = train(CONFIG, [*overrides, f"trainer.experiment_name={name}"], loop=loop, console=Console(stderr=True))
    row = {
        "run": name,
        "overrides": overrides,
        "accuracy_before": result.accuracy_before,
        "accuracy_after": result.accuracy_after,
        "steps": result.steps,
        "seconds": round(time.perf_counter() - began, 1),
        "dispatched": result.dispatched,
        "fates": result.fates,
    }
    print(json.dumps(row), flush=True)  # noqa: T201
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffled", action="store_true", help="also run the control")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        measure(f"learning-{seed}", f"data.seed={seed}")
    if arguments.shuffled:
        measure("learning-shuffled", "data.seed=0", loop=ShuffledRewards)


if __name__ == "__main__":
    main()
