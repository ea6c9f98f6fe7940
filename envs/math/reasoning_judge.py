"""The scores of reasoning-gym. For worker processes: a data set's own scoring code may take any time."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import reasoning_gym

_EVALUATING = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose `score_answer` passes the model's answer to `eval`."""


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
    if dataset in _EVALUATING:
        type(source).score_answer.__globals__["eval"] = ast.literal_eval
    score = float(source.score_answer(answer, entry))
    yield {"outcome": "equal" if score >= 1.0 else "different", "score": score}


@lru_cache(maxsize=16)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
