"""Agents for a run that is served: `agentrl serve examples/serve.yaml`, then `python examples/serve_client.py`.

Needs nothing of agentrl but the calculator: any program that speaks HTTP can do the same.
"""

import asyncio
import json
import sys
from typing import Any

import httpx

from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, calculate, score_answer

AGENTS = 64


def calculator(arguments: str) -> str:
    """What the tool answers; the model gets to see what is wrong with its call."""
    try:
        return calculate(str(json.loads(arguments).get("expression")))
    except ValueError as error:
        return f"Error: {error}"


async def play(http: httpx.AsyncClient) -> float | None:
    """One episode, from its opening to its reward; None if there is none to play now."""
    opened = await http.post("/agentrl/episodes")
    if opened.status_code == 429:
        await asyncio.sleep(float(opened.headers["Retry-After"]))
        return None
    episode = opened.raise_for_status().json()
    key = {"Authorization": f"Bearer {episode['api_key']}"}
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": episode["task"]["prompt"]},
    ]
    while True:
        body = {"model": episode["model"], "messages": messages, "tools": [CALCULATOR_SPEC]}
        answer = await http.post(f"{episode['base_url']}/chat/completions", json=body, headers=key)
        message = answer.raise_for_status().json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls") or len(messages) > 8:
            break
        for call in message["tool_calls"]:
            result = calculator(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    reward = score_answer(message["content"] or "", episode["task"]["answer"])
    (await http.post("/agentrl/reward", json={"reward": reward}, headers=key)).raise_for_status()
    return reward


async def agent(http: httpx.AsyncClient) -> None:
    """Plays one episode after the other until the run is over; one that failed ends as a time-out."""
    while True:
        try:
            await play(http)
        except httpx.HTTPStatusError:
            continue
        except httpx.HTTPError:
            return


async def main(url: str) -> None:
    limits = httpx.Limits(max_connections=AGENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(agent(http) for _ in range(AGENTS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8910"))
