"""An agent on OpenAI's SDK: `python examples/external/openai_sdk_agent.py`, with `pip install openai`."""

import json

from openai import AsyncOpenAI

from agentrl import AgentLoop, Policy, Task, train
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate, score_answer


def calculator(arguments: str) -> str:
    """What the tool answers; the model gets to see what is wrong with its call."""
    try:
        return calculate(str(json.loads(arguments).get("expression")))
    except ValueError as error:
        return f"Error: {error}"


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *task.messages()]
        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            for _ in range(4):
                completion = await client.chat.completions.create(
                    model=policy.model, messages=messages, tools=[CALCULATOR_SPEC]
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = calculator(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return score_answer(message.content or "", task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
