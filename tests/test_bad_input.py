"""What a user may get wrong is said at once: one message, exit status 2, no traceback, and nothing heavy imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = '{"prompt": "What is 2 + 2?", "answer": "4"}\n'
CASES: dict[str, tuple[list[str], str]] = {
    "unknown key": (["rollout.max_head_offpolicynes=2"], "did you mean rollout.max_head_offpolicyness?"),
    "wrong type": (["rollout.n=many"], "expected integer, at least 1; got 'many' (text)"),
    "missing model": (["model.path=/nowhere/model"], "model.path: '/nowhere/model' is no folder"),
    "missing data file": (["data.train=nowhere.jsonl"], "data.train: there is no file nowhere.jsonl"),
    "no answer key": (["data.train=answerless.jsonl"], "row 0 has no 'answer'"),
    "empty data": (["data.train=empty.jsonl"], "empty.jsonl"),
    "broken line": (["data.train=broken.jsonl"], "broken.jsonl, line 2 is not JSON"),
    "mini-batch": (["data.train_batch_size=8", "actor.ppo_mini_batch_size=16"], "data.train_batch_size"),
    "unknown estimator": (["algorithm.adv_estimator=grpoo"], "did you mean grpo?"),
    "no such loop": (["agent.loop=nowhere:Loop"], "agent.loop: no module 'nowhere'"),
    "no such reward": (["env.cls=agentrl:FunctionEnv", "env.args.reward=nowhere:f"], "env.args.reward: no module"),
    "no such answer format": (["env.cls=agentrl.envs.math:MathEnv", "env.args.answer_format=box"], "answer_format"),
    "no such sampler": (["data.sampler=curriculm"], "data.sampler: 'curriculm' is neither"),
    "no reward function": (["env.cls=agentrl:FunctionEnv", "env.args.reward=5"], "env.args.reward is 5"),
    "no such renderer": (["model.renderer=zzz"], "model.renderer: No renderer config registered"),
    "no such model on a hub": (["model.path=nobody/nothing"], "model.path: nobody/nothing is not in the local cache"),
    "no such critic": (["algorithm.adv_estimator=gae", "critic.path=/nowhere"], "critic.path: '/nowhere' is no folder"),
    "no gguf": (["model.path=empty.gguf"], "empty.gguf is no GGUF file"),
    "broken parquet": (["data.train=broken.parquet"], "broken.parquet"),
    "vllm is not installed": (["rollout.engine=vllm"], "rollout.engine is vllm, which is not installed here"),
    "no such layer": (["model.lora_rank=4", "model.target_modules=[query]"], "the model has no layer query"),
}
CASES |= {
    "episodes for anybody": (
        ["agent.loop=agentrl:OutsideAgent", "env.cls=null", "gateway.host=0.0.0.0"],
        "GATEWAY_KEY",
    ),
    "no such address": (["gateway.host=192.0.2.1", "gateway.port=8910"], "192.0.2.1:8910 can't be listened on"),
    "nobody from outside": (["gateway.idle_timeout=5"], "start the run with `agentrl serve`"),
}
LOOK_AT_THE_MODEL = {"no such layer"}
"""What can't be known without building the model, its weights left out."""
RUN = """
import sys
from agentrl.cli import app
try:
    app(["train", "run.yaml", *sys.argv[1:]])
except SystemExit as end:
    print("imported:", *[name for name in ("torch", "transformers", "ray") if name in sys.modules])
    sys.exit(end.code)
"""


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "answerless.jsonl").write_text('{"prompt": "What is 2 + 2?", "gold": "4"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "broken.jsonl").write_text(GOOD + '{"prompt": \n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not all there is to it")
    (tmp_path / "run.yaml").write_text("data: {train: good.jsonl}\nenv: {cls: 'agentrl.envs.math:ArithmeticEnv'}\n")
    overrides, says = CASES[name]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and says in " ".join(done.stderr.split())
    if name not in LOOK_AT_THE_MODEL:
        assert done.stdout.strip() == "imported:", "the answer takes no longer than it must"
    assert not (tmp_path / "runs").exists()
