"""An agent on LangGraph: `python examples/external/langgraph_agent.py`.

With `pip install langchain langchain-openai`.
"""

from langchain.agents import create_agent
from langchain.tools import tool
from langgraph.errors import GraphRecursionError

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import langchain_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate, score_answer


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    try:
        return calculate(expression)
    except ValueError as error:
        return str(error)


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        agent = create_agent(langchain_model(policy), [calculator], system_prompt=SYSTEM_PROMPT)
        try:
            state = await agent.ainvoke({"messages": task.messages()}, {"recursion_limit": 8})
        except GraphRecursionError:  # no answer after four calls
            return 0.0
        return score_answer(state["messages"][-1].text, task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
