"""One episode against a script. Episodes that are played again are so at once: what is tested is the order of events,
not the pause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import AgentLoop, Env, Task
from agentrl.rollout import Outcome
from agentrl.session import ChatFormat
from tests.support.rollout import TASK, play_episode, rollout_config
from tests.support.scripted import Script, ScriptedEngine, turns


@pytest.fixture(autouse=True)
def no_pause_before_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.episode._RETRY_SECONDS", 0)


@pytest.fixture
def play(tmp_path: Path, chat_format: ChatFormat) -> Callable[..., Any]:
    """Plays one episode of a loop against a script."""

    async def run(
        loop: type[AgentLoop],
        script: Script | ScriptedEngine | None = None,
        *overrides: str,
        env: type[Env] | None = None,
        task: Task = TASK,
    ) -> Outcome:
        engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script or turns(chat_format, "4"))
        return await play_episode(rollout_config(tmp_path, *overrides), chat_format, engine, loop, env=env, task=task)

    return run
