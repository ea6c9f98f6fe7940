"""The scores of reasoning-gym. For worker processes: a data set's own scoring code may take any time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import reasoning_gym

from agentrl.envs.math.evaluation import guard


def judge_reasoning_gym(
    dataset: str, seed: int, size: int, index: int, config: dict[str, Any], question: str, answer: str
) -> Iterator[dict[str, Any]]:
    """What a data set says an answer is worth, in the two parts that `judge_worker` speaks of."""
    source = _dataset(dataset, seed, size, json.dumps(config))
    entry = source[index]
    if entry["question"] != question:
        yield {"failed": "the installed reasoning-gym makes another question of it: start a new run with new tasks"}
        return
    yield {"ready": True}
    score = float(source.score_answer(answer, entry))
    yield {"outcome": "equal" if score >= 1.0 else "different", "score": score}


@lru_cache(maxsize=16)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))


# Many of its data sets have Python or sympy evaluate the answer.
guard("reasoning_gym")
