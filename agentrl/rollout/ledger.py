"""The books: every dispatched episode ends with exactly one fate."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from agentrl.record import Fate, FateRecord, Task
from agentrl.record.codec import to_json
from agentrl.rollout.episode import Outcome


@dataclass(slots=True)
class _Open:
    group_id: str
    task: Task
    version_admitted: int
    outcome: Outcome | None = None
    attempts: int = 0
    began: float = 0.0


class Ledger:
    """Keeps `dispatched == sum of fates + in flight` at every moment, and writes `fates.jsonl`.

    Args:
        path: of `fates.jsonl`; None keeps no file.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("ab") if path is not None else None
        self._open: dict[str, _Open] = {}
        self.dispatched = 0
        self.fates: Counter[Fate] = Counter()

    @property
    def in_flight(self) -> int:
        """Dispatched episodes without a fate."""
        return len(self._open)

    def dispatch(self, episode_id: str, group_id: str, task: Task, version: int) -> None:
        """An episode starts."""
        if episode_id in self._open:
            raise ValueError(f"episode {episode_id} is already in flight")
        self._open[episode_id] = _Open(group_id, task, version)
        self.dispatched += 1

    def attempt(self, episode_id: str) -> int:
        """It is played once more; returns the number of the attempt, from 1."""
        self._open[episode_id].attempts += 1
        self._open[episode_id].began = time.monotonic()
        return self._open[episode_id].attempts

    def attempts(self, episode_id: str) -> int:
        """How often it was played so far."""
        return self._open[episode_id].attempts

    def longest_running(self) -> str | None:
        """The episode that has been played for longest, in words; None if none is."""
        playing = {key: entry.began for key, entry in self._open.items() if entry.attempts and entry.outcome is None}
        if not playing:
            return None
        oldest = min(playing, key=playing.__getitem__)
        return f"{oldest} (task {self._open[oldest].task.id}, {time.monotonic() - playing[oldest]:.0f} s)"

    def admitted_again(self, episode_id: str, version: int) -> None:
        """It is to be played again, under the weights of `version` or newer."""
        self._open[episode_id].version_admitted = version
        self._open[episode_id].outcome = None

    def ended(self, episode_id: str, outcome: Outcome) -> None:
        """An episode's agent is done; its fate may come later."""
        self._open[episode_id].outcome = outcome

    def seal(self, episode_id: str, fate: Fate, reason: str, version: int) -> None:
        """Gives an episode its fate."""
        entry = self._open.pop(episode_id)
        self.fates[fate] += 1
        if self._file is None:
            return
        outcome, trajectory = entry.outcome, entry.outcome.trajectory if entry.outcome else None
        record = FateRecord(
            episode_id=episode_id,
            group_id=entry.group_id,
            task_id=entry.task.id,
            dataset_index=entry.task.index,
            epoch=entry.task.epoch,
            fate=fate,
            reason=reason,
            version_admitted=entry.version_admitted,
            version_oldest=trajectory.oldest_version if trajectory else None,
            version_ended=version,
            reward=outcome.reward.value if outcome and outcome.reward else None,
            turns=trajectory.turns if trajectory else 0,
            tokens=trajectory.sampled_tokens if trajectory else 0,
            seconds=round(outcome.seconds, 4) if outcome else 0.0,
            time=time.time(),
            environment=entry.task.environment,
            attempts=entry.attempts,
        )
        self._file.write(to_json(record) + b"\n")
        self._file.flush()

    def seal_rest(self, reason: str, version: int) -> None:
        """The run is over: whatever is still in flight is cancelled."""
        for episode_id in list(self._open):
            self.seal(episode_id, Fate.CANCELLED, reason, version)
