"""Whole runs through the command line, in processes of their own: what they leave, and how they end."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl.config import load_config
from agentrl.observe import STEP_KEYS
from agentrl.record import load
from agentrl.tiny import tiny_model_path
from tests.support.runs import (
    MATH,
    SMALL,
    Finished,
    assert_every_episode_has_one_fate,
    finish,
    started,
    train,
    until_step,
)

Folders = Callable[[int], list[Path]]


@pytest.fixture(scope="module")
def math_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("math")
    return train(MATH, folder, *SMALL, "trainer.total_steps=4", "trainer.test_freq=2")


def test_a_run_ends_well_and_says_what_came_of_it(math_run: Finished, run_folders: Folders) -> None:
    assert math_run.status == 0, math_run.err
    assert math_run.err == ""
    summary = re.search(r"^(\d+) episodes: (.*)$", math_run.out, re.MULTILINE)
    assert summary is not None, math_run.out
    counts = {fate: int(count) for count, fate in (part.split(" ") for part in summary[2].split(", "))}
    assert sum(counts.values()) == int(summary[1]) == len(math_run.fates)
    assert counts == Counter(fate["fate"] for fate in math_run.fates)
    assert counts["trained"] >= 4 * 2 * 2
    assert_every_episode_has_one_fate(math_run)
    first, last = math_run.rows[0]["val/accuracy"], math_run.rows[-1]["val/accuracy"]
    assert f"held-out accuracy {first:.3f} -> {last:.3f}" in math_run.out
    assert str(math_run.folder.name) in math_run.out
    assert run_folders(math_run.pid) == []


def test_its_metrics_have_a_row_for_each_step(math_run: Finished) -> None:
    assert [row["step"] for row in math_run.steps] == [1, 2, 3, 4]
    assert [row["policy_version"] for row in math_run.steps] == [0, 1, 2, 3]
    validated = [(row["val/step"], row["step"]) for row in math_run.rows if "val/accuracy" in row]
    assert [step for step, _ in validated] == [0, 2, 4], "of the policy after these steps"
    assert all(step <= recorded for step, recorded in validated), "training did not wait for it"
    for row in math_run.steps:
        assert set(STEP_KEYS) <= row.keys()
        assert all(isinstance(row[key], int | float) for key in STEP_KEYS)
        assert 0 <= row["staleness/lag_max"] <= 2
        assert row["tokens/trained"] > 0 and row["actor/grad_norm"] > 0 and row["actor/skipped_steps"] == 0


def test_its_folder_holds_what_tools_expect(math_run: Finished) -> None:
    folder = math_run.folder
    names = {path.name for path in folder.iterdir()}
    assert {
        *("config.yaml", "environment.json", "metrics.jsonl", "fates.jsonl"),
        *("trajectories", "model", "tensorboard", "logs"),
    } <= names
    config = load_config(folder / "config.yaml")
    assert config.trainer.total_steps == 4 and config.rollout.n == 4
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["devices"] == ["cpu"] and environment["packages"]["agentrl"] == agentrl.__version__
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("val/step")] == [0, 2, 4]


def test_its_model_is_a_trained_one_that_transformers_loads(math_run: Finished) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(math_run.folder / "model", dtype=torch.float32)
    before: Any = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    changed = [
        name
        for (name, new), (_, old) in zip(model.named_parameters(), before.named_parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert len(changed) == len(list(before.named_parameters()))
    ids = AutoTokenizer.from_pretrained(math_run.folder / "model")("12 + 30", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.isfinite().all()


def test_its_trajectories_are_the_trained_episodes(math_run: Finished) -> None:
    trained = {fate["episode_id"] for fate in math_run.fates if fate["fate"] == "trained"}
    episodes = {t.episode_id: t for t in load(math_run.folder / "trajectories") if t.group_id != "val"}
    assert episodes.keys() == trained
    for trajectory in episodes.values():
        for branch in trajectory.branches:
            sampled = branch.loss_mask == 1
            assert (branch.versions[sampled] >= 0).all() and (branch.versions[~sampled] == -1).all()
            assert (branch.logprobs[sampled] < 0).all() and (branch.logprobs[~sampled] == 0).all()
            for turn in branch.turns:
                assert (np.diff(branch.versions[turn.start : turn.end]) >= 0).all()


PLAIN_AGENT = """
from agentrl import AgentLoop

class Solver(AgentLoop):
    def run(self, task, policy):
        reply = policy.chat([{"role": "user", "content": task.prompt}])
        assert reply.turn is not None
        return float(len(reply.text) % 2)
"""
ASYNC_AGENT = """
from agentrl import AgentLoop, Policy, Task

class Solver(AgentLoop):
    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    async def run(self, task: Task, policy: Policy) -> float:
        messages = [{"role": "user", "content": task.prompt}]
        first = await policy.chat(messages)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Again."}]
        second = await policy.chat(messages)
        return self.bonus + (len(first.text) + len(second.text)) % 2
"""
OWN_RUN = """
data: {train: tasks.jsonl, max_prompt_length: 200, max_response_length: 24}
agent: {loop: my_agent:Solver}
rollout: {n: 4, max_model_len: 224, filter_zero_variance: false, max_concurrent: 16}
actor: {ppo_mini_batch_size: 2, optim: {lr: 0.001}}
trainer: {total_steps: 3}
"""


def own_agent(folder: Path, code: str) -> Path:
    """A user's folder, outside the repository: an agent, its tasks and a YAML file."""
    (folder / "my_agent.py").write_text(code)
    rows = [{"prompt": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(64)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(OWN_RUN)
    return Path("run.yaml")


def test_a_plain_agent_of_ones_own_trains_on_policy(tmp_path: Path) -> None:
    """Without any lag the engine's distribution is the trainer's, at any temperature."""
    file = own_agent(tmp_path, PLAIN_AGENT)
    run = train(file, tmp_path, "rollout.max_head_offpolicyness=0", "rollout.temperature=0.6")
    assert run.status == 0, run.err
    assert len(run.steps) == 3
    for row in run.steps:
        assert row["staleness/lag_max"] == 0 and row["staleness/partial_ratio"] == 0
        assert row["mismatch/max"] < 1e-3
        assert row["actor/ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert_every_episode_has_one_fate(run)


def test_processes_that_an_agent_forked_do_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    """They hold whatever their parent held."""
    code = """
import os, pathlib, time
from agentrl import AgentLoop

class Solver(AgentLoop):
    def run(self, task, policy):
        reply = policy.chat([{"role": "user", "content": task.prompt}])
        if not os.fork():
            pathlib.Path(f"forked-{os.getpid()}").touch()
            time.sleep(600)
        return float(len(reply.text) % 2)
"""
    run = train(own_agent(tmp_path, code), tmp_path, "trainer.total_steps=1")
    assert run.status == 0, run.err
    forked = [int(path.name.partition("-")[2]) for path in tmp_path.glob("forked-*")]
    assert forked
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in forked if psutil.pid_exists(pid)], timeout=5)
    assert alive == []


def test_an_interrupted_run_of_an_async_agent_stops_in_order_and_leaves_nothing(
    tmp_path: Path, run_folders: Folders
) -> None:
    file = own_agent(tmp_path, ASYNC_AGENT)
    sync = "async_training.trigger_parameter_sync_step=2"
    with started(file, tmp_path, "agent.args={bonus: 0.5}", sync, "trainer.total_steps=1000") as process:
        until_step(process, 4)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3 and len(run_folders(process.pid)) == 2
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # impatience must not leave anything behind
        began = time.monotonic()
        run = finish(process, tmp_path, timeout=30)
        assert time.monotonic() - began < 5
    assert run.status == 130
    assert "Traceback" not in run.err and str(run.folder.name) in run.err
    _, alive = psutil.wait_procs(children, timeout=0.5)
    assert alive == []
    assert run_folders(run.pid) == []
    assert [row["policy_version"] for row in run.steps[:4]] == [0, 0, 1, 1]
    assert_every_episode_has_one_fate(run)
    assert {"trained", "cancelled"} <= {fate["fate"] for fate in run.fates}
    trained = list(load(run.folder / "trajectories"))
    assert {t.reward for t in trained} == {0.5, 1.5}
    assert {t.turns for t in trained} == {2}


@pytest.mark.full
def test_the_processes_of_a_killed_supervisor_end_and_clean_up(tmp_path: Path, run_folders: Folders) -> None:
    with started(MATH, tmp_path, *SMALL, "trainer.total_steps=1000", "trainer.val_before_train=false") as process:
        until_step(process, 1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert run_folders(process.pid) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.max_head_offpolicynes=2", "max_head_offpolicyness"),
        ("model.path=./no-such-model", "model.path: './no-such-model' is no folder with a config.json"),
        ("data.train=missing.jsonl", "data.train: there is no file missing.jsonl"),
        ("agent.loop=no_such_module:Solver", "agent.loop: no module 'no_such_module'"),
        ("agent.loop=broken:Solver", "agent.loop: broken can't be imported: ZeroDivisionError"),
        ("trainer.device=npu", "trainer.device is 'npu', but torch sees no such device; there is: cpu"),
    ],
)
def test_what_cannot_run_is_one_clear_message(override: str, message: str, tmp_path: Path) -> None:
    file = own_agent(tmp_path, PLAIN_AGENT)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    run = train(file, tmp_path, override)
    assert run.status == 2
    assert run.err.startswith("error: ") and run.err.count("error: ") == 1
    assert message in run.err
    assert "Traceback" not in run.err + run.out
    assert not (tmp_path / "runs").exists()
