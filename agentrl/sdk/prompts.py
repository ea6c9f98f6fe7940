"""The first messages of an episode."""

from __future__ import annotations

from agentrl.record import Message, Task


def with_system_prompt(prompt: str, task: Task) -> list[Message]:
    """The task's messages behind a system message, unless the prompt is empty or the task brings one of its own."""
    messages = task.messages()
    if not prompt or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": prompt}, *messages]
