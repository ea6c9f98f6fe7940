"""The examples of this room load as they are, and with the overrides they speak of."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.rollout.episode import Plugins
from agentrl.rollout.tasks import load_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = '{"question": "1 + 1?", "answer": "<<1+1=2>>2\\n#### 2"}\n'


@pytest.mark.parametrize("name", ["math", "math_gsm8k", "math_smollm2"])
def test_an_example_loads(name: str) -> None:
    assert Plugins.load(load_config(str(EXAMPLES / f"{name}.yaml")))


def test_the_cpu_example_takes_a_file_of_yours(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(ROW)
    config = load_config(str(EXAMPLES / "math_smollm2.yaml"), [f"data.train={tmp_path}/train.jsonl"])
    (task,) = load_tasks(config, "train")["default"]
    assert (task.prompt, task.answer) == ("1 + 1?", "<<1+1=2>>2\n#### 2")


def test_the_cpu_example_takes_the_hubs_data() -> None:
    overrides = ["data.train=openai/gsm8k", "data.train_args={name: main}"]
    config = load_config(str(EXAMPLES / "math_smollm2.yaml"), overrides)
    assert config.data.train_args == {"name": "main"}
