"""`agentrl serve` as a user runs it: the command in one process, the agents of the example in another one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import SMALL, assert_every_episode_has_one_fate, finish, started

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
def test_agents_that_run_elsewhere_are_trained(tmp_path: Path) -> None:
    small = [override for override in SMALL if not override.startswith("data.val")]
    overrides = (*small, "gateway.port=0", "trainer.total_steps=4")
    with started(EXAMPLES / "serve.yaml", tmp_path, *overrides, command_name="serve") as run:
        assert run.stdout is not None
        line = next(line for line in run.stdout if "agents get episodes at" in line)
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url is not None
        agents = subprocess.run([sys.executable, str(EXAMPLES / "serve_client.py"), url[0]], timeout=100, check=False)
        finished = finish(run, tmp_path)
    assert (finished.status, agents.returncode) == (0, 0), finished.err
    assert len(finished.steps) == 4
    assert_every_episode_has_one_fate(finished)
    fates = {fate["fate"] for fate in finished.fates}
    assert "trained" in fates
    assert fates <= {"trained", "filtered", "cancelled"}
