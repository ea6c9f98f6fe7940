"""An agent on Pydantic AI: `python examples/external/pydantic_ai_agent.py`.

With `pip install pydantic-ai-slim[openai]`.
"""

from pydantic_ai import Agent, ModelRetry, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import pydantic_ai_model
from agentrl.envs.math.arithmetic import SYSTEM_PROMPT, calculate, score_answer


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    try:
        return calculate(expression)
    except ValueError as error:
        raise ModelRetry(str(error)) from error


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        agent = Agent(pydantic_ai_model(policy), system_prompt=SYSTEM_PROMPT, tools=[calculator])
        try:
            result = await agent.run(str(task.prompt), usage_limits=UsageLimits(request_limit=4))
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # too many wrong calls, or no answer in time
            return 0.0
        return score_answer(result.output, task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
