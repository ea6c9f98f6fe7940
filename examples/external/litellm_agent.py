"""An agent on LiteLLM: `python examples/external/litellm_agent.py`, with `pip install litellm`.

Without LITELLM_LOCAL_MODEL_COST_MAP=True in its environment LiteLLM fetches a price list when it is imported.
"""

import json

from litellm import acompletion

from agentrl import AgentLoop, Policy, Task, train
from agentrl.agents.external import litellm_arguments
from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate, score_answer


class Solver(AgentLoop):
    """Lets the model call a calculator, and rewards the right answer."""

    async def run(self, task: Task, policy: Policy) -> float:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *task.messages()]
        for _ in range(4):
            response = await acompletion(messages=messages, tools=[CALCULATOR_SPEC], **litellm_arguments(policy))
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                expression = json.loads(call.function.arguments).get("expression")
                result = calculate(str(expression))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return score_answer(message.content or "", task.answer)


if __name__ == "__main__":
    train("examples/external/arithmetic.yaml", loop=Solver)
