"""An own agent in fifteen lines: `python examples/my_agent.py`, or `agentrl train examples/my_agent.yaml`."""

from agentrl import AgentLoop, Policy, Task, train
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate, score_answer


class Solver(AgentLoop):
    """Lets the model call a calculator once, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *task.messages()]
        reply = await policy.chat(messages, tools=[CALCULATOR_SPEC])
        if reply.tool_calls:
            result = calculate(str(reply.tool_calls[0].arguments.get("expression")))
            messages += [reply.message, {"role": "tool", "content": result}]
            reply = await policy.chat(messages, tools=[CALCULATOR_SPEC])
        return score_answer(reply.text, task.answer)


if __name__ == "__main__":
    train("examples/my_agent.yaml", loop=Solver)
