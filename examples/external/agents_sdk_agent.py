"""An agent on OpenAI's Agents SDK: `python examples/external/agents_sdk_agent.py`, with `pip install openai-agents`."""

from agents import Agent, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import agents_sdk_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate, score_answer


@function_tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        agent = Agent("solver", instructions=SYSTEM_PROMPT, tools=[calculator], model=agents_sdk_model(policy))
        try:
            result = await Runner.run(agent, str(task.prompt), max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError):  # no answer in time, or a tool that does not exist
            return 0.0
        return score_answer(str(result.final_output), task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
