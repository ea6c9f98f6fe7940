"""Episodes that are played again are so at once: what is tested is the order of events, not the pause."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_pause_before_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.episode._RETRY_SECONDS", 0)
