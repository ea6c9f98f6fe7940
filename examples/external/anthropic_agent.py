"""An agent on Anthropic's SDK: `python examples/external/anthropic_agent.py`, with `pip install anthropic`."""

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import anthropic_client
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate, score_answer

TOOL = {"name": "calculator", "input_schema": CALCULATOR_SPEC["function"]["parameters"]}


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        messages = task.messages()
        async with anthropic_client(policy) as client:
            for _ in range(4):
                message = await client.messages.create(
                    model=policy.model, system=SYSTEM_PROMPT, messages=messages, tools=[TOOL], max_tokens=64
                )
                messages.append({"role": "assistant", "content": message.content})
                calls = [block for block in message.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [(call.id, calculate(str(call.input.get("expression")))) for call in calls]
                blocks = [{"type": "tool_result", "tool_use_id": id, "content": result} for id, result in results]
                messages.append({"role": "user", "content": blocks})
        return score_answer("".join(block.text for block in message.content if block.type == "text"), task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
