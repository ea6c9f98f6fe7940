"""How benchmarks say what they measured."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any


def report(row: dict[str, Any]) -> None:
    """Prints one JSON object, at once."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }
