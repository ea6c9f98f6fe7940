"""An agent on DSPy: `python examples/external/dspy_agent.py`, with `pip install dspy`.

DSPy writes its own prompts and reads the fields of an answer from its text: for a real model, as `model.path` in
qwen3.yaml names one.
"""

import dspy
from dspy.utils.exceptions import AdapterParseError

from agentrl import AgentLoop, Task, train
from agentrl.agents.external import dspy_lm
from agentrl.envs.math.arithmetic import calculate
from agentrl.sdk import SyncPolicy


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer. Blocks, and so plays in a thread."""

    def run(self, task: Task, policy: SyncPolicy) -> float:
        react = dspy.ReAct("question -> answer: int", tools=[calculator], max_iters=4)
        with dspy.context(lm=dspy_lm(policy)):
            try:
                return float(str(react(question=str(task.prompt)).answer) == task.answer)
            except AdapterParseError:  # an answer without the fields that were asked for
                return 0.0


if __name__ == "__main__":
    train("examples/external/qwen3.yaml", loop=Solver)
