"""The examples: each one's Solver plays an episode under its own settings."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from agentrl import AgentLoop, Task
from agentrl.config import RunConfig, load_config
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT
from agentrl.gateway import Gateway, GatewayAddress
from agentrl.rollout import EpisodeRunner, Plugins
from agentrl.session import ChatFormat
from tests.frameworks.test_dspy import fields
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import call, calls
from tests.support.gateway import served
from tests.support.scripted import ScriptedEngine, assert_trained_as_sampled, says, turns

FOLDER = Path(__file__).parents[2] / "examples" / "external"
EXAMPLES = sorted(FOLDER.glob("*_agent.py"))
TASK = Task("What is 12 + 30?", "42", id="t0")

CALCULATOR = (calls("12 + 30"), "\\boxed{42}")
SCRIPTS = {
    "smolagents_agent": (calls("12 + 30"), call("final_answer", answer="42")),
    "dspy_agent": (
        fields(next_thought="Add.", next_tool_name="calculator", next_tool_args='{"expression": "12 + 30"}'),
        fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="It is 12 + 30.", answer="42"),
    ),
    "mini_swe_agent": (
        call("bash", command="echo $((12 + 30))"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"),
    ),
}
NO_DOCKER = {"mini_swe_agent": ["agent.args={environment: {environment_class: local}}"]}


def solver_of(example: Path) -> type[AgentLoop]:
    spec = spec_from_file_location(example.stem, example)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Solver


def config_of(example: Path) -> RunConfig:
    """The one that running the example as a script trains with."""
    (named,) = re.findall(r'train\("(examples/external/\w+\.yaml)", loop=Solver\)', example.read_text())
    return load_config(FOLDER.parents[1] / named, NO_DOCKER.get(example.stem, []))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@asynchronous
async def test_an_example_solves_a_task(example: Path, chat_format: ChatFormat) -> None:
    config = config_of(example)
    script = SCRIPTS.get(example.stem, CALCULATOR)
    engine = ScriptedEngine(turns(chat_format, *script))
    plugins = {"default": Plugins(solver_of(example), None, config.agent.args)}
    async with served(Gateway(GatewayAddress(), model="policy")) as gateway:
        runner = EpisodeRunner(config, plugins, chat_format, engine, door=gateway)
        outcome = await runner.play(TASK, group_id="g0", episode_id="g0.1", version=0)
    assert outcome.reason == ""
    assert outcome.reward is not None and outcome.reward.value == 1.0
    assert outcome.trajectory is not None
    assert_trained_as_sampled(
        outcome.trajectory.branches, engine, [says(chat_format, text).token_ids for text in script]
    )
    if example.stem not in SCRIPTS:
        # Only this prompt means anything to the bundled model: the framework must not add a word.
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *TASK.messages()]
        assert engine.requests[0].token_ids.tolist() == chat_format.render(messages, [CALCULATOR_SPEC])
