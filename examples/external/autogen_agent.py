"""An agent on AutoGen: `python examples/external/autogen_agent.py`.

With `pip install autogen-agentchat autogen-ext[openai]`.
"""

from autogen_agentchat.agents import AssistantAgent

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import autogen_client
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate, score_answer


async def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculate(expression)


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        client = autogen_client(policy)
        try:
            agent = AssistantAgent(
                "solver", client, tools=[calculator], system_message=SYSTEM_PROMPT, max_tool_iterations=3
            )
            result = await agent.run(task=str(task.prompt))
        finally:
            await client.close()
        return score_answer(result.messages[-1].to_text(), task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
