"""An agent on mini-swe-agent: `python examples/external/mini_swe_agent.py`, with `pip install mini-swe-agent`.

It works in a shell, by calling a tool of its own: for a real model, as `model.path` in qwen3.yaml names one, and with
Docker, since the shell does what an untrained model tells it.
"""

from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment

from agentrl import AgentLoop, Task, train
from agentrl.agents.external import mini_swe_model
from agentrl.sdk import SyncPolicy

SYSTEM = "You work in a shell. Each of your answers calls the tool bash once, with one command."
INSTANCE = """{{ task }}
When you know the result, submit it: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo RESULT"""


class Solver(AgentLoop):
    """Lets the model calculate in a shell, and rewards the right answer. Blocks, and so plays in a thread.

    Args:
        environment: where the commands run, as mini-swe-agent's own configuration has it.
    """

    def __init__(self, environment: dict[str, Any]) -> None:
        self.environment = environment

    def run(self, task: Task, policy: SyncPolicy) -> float:
        shell = get_environment(self.environment)
        agent = DefaultAgent(
            mini_swe_model(policy), shell, system_template=SYSTEM, instance_template=INSTANCE, step_limit=4
        )
        return float(agent.run(str(task.prompt))["submission"].strip() == task.answer)


if __name__ == "__main__":
    train("examples/external/mini_swe.yaml", loop=Solver)
