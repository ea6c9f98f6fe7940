"""An agent on smolagents: `python examples/external/smolagents_agent.py`, with `pip install smolagents[openai]`.

Its prompt is long, and a final answer is a tool call too: for a real model, as `model.path` in qwen3.yaml names one.
"""

from smolagents import LogLevel, ToolCallingAgent, tool

from agentrl import AgentLoop, Task, train
from agentrl.agents.external import smolagents_model
from agentrl.envs.math.arithmetic import calculate
from agentrl.sdk import SyncPolicy


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses.
    """
    return calculate(expression)


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer. Blocks, and so plays in a thread."""

    def run(self, task: Task, policy: SyncPolicy) -> float:
        model = smolagents_model(policy)
        agent = ToolCallingAgent([calculator], model, max_steps=4, verbosity_level=LogLevel.OFF)
        return float(str(agent.run(str(task.prompt))).strip() == task.answer)


if __name__ == "__main__":
    train("examples/external/qwen3.yaml", loop=Solver)
