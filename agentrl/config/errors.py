"""What is wrong with a configuration: one `Problem` a key, all of them raised together as one `ConfigError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to change in a configuration."""

    key: str
    """Dotted key, such as `rollout.n`, or the file or override that could not be read."""
    reason: str
    """What was expected and what came."""
    fix: str
    """What to write instead."""
    origin: str = ""
    """Where the value comes from: a file and line, or an override. Empty: from a default."""
    others: tuple[str, ...] = ()
    """Further keys that the reason speaks of."""

    def __str__(self) -> str:
        where = f"  [{self.origin}]" if self.origin else ""
        return f"{self.key}{where}\n    {self.reason}\n    fix: {self.fix}"


class ConfigError(ValueError):
    """A configuration that cannot be run. The message lists every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        """The problems, in the order they were found."""
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n  ".join([f"{title} in the configuration:", *map(str, self.problems)]))
