"""Messages to token ids and back, for one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.record import Message, ToolCall, ToolSpec
from agentrl.record.messages import with_compact_tools


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn in structured form.

    Attributes:
        tool_calls: those that are complete and valid.
        invalid_tool_calls: raw text of those that are cut off or malformed; never repaired, never executed.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    invalid_tool_calls: tuple[str, ...]


class ChatFormat:
    """How one model's conversations look as tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        renderer: of the package `renderers`.
        bridger: the same, told to keep earlier turns as they are. It builds the next prompt where no earlier turn had
            reasoning: a template that strips reasoning then has nothing to strip. None: use `renderer`.
        compact_tools: describe tools by `with_compact_tools` instead of the model's own template.
    """

    def __init__(self, tokenizer: Any, renderer: Any, *, compact_tools: bool, bridger: Any = None) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._bridger = bridger or renderer
        self._compact_tools = compact_tools
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())

    @classmethod
    def load(cls, config: ModelConfig, path: str) -> ChatFormat:
        """The format of the model in `path`, as `config` wants it.

        Raises:
            OSError: no tokenizer there.
            ValueError: an unknown renderer; the message lists the known ones.
        """
        from renderers import AutoRendererConfig, create_renderer
        from renderers.configs import config_from_name
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        asked = tokenizer.init_kwargs.get("agentrl", {})
        name = asked.get("renderer", "auto") if config.renderer == "auto" else config.renderer
        renderer_config: Any = config_from_name(name) or AutoRendererConfig()
        renderer = create_renderer(tokenizer, renderer_config)
        try:
            bridger = create_renderer(tokenizer, renderer_config.model_copy(update={"thinking_retention": "all"}))
        except (NotImplementedError, ValueError):
            bridger = None  # A renderer that knows its template only as a black box can't promise that.
        tool_prompt = config.tool_prompt
        if tool_prompt == "auto":
            tool_prompt = asked.get("tool_prompt", "template")
        return cls(tokenizer, renderer, compact_tools=tool_prompt == "compact", bridger=bridger)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[int]:
        """The prompt for the next assistant turn, from nothing."""
        if tools and self._compact_tools:
            messages, tools = with_compact_tools(messages, tools), None
        return self._renderer.render_ids(list(messages), tools=self._specs(tools), add_generation_prompt=True)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None,
        *,
        reasoned: bool,
    ) -> list[int] | None:
        """The prompt for the turn after `new_messages`, on top of exactly the tokens of the last turn.

        None where the template does not allow that (it strips earlier reasoning, say): then render from nothing,
        and the message graph forks.

        Args:
            reasoned: whether any earlier turn holds reasoning.
        """
        if self._compact_tools:
            tools = None
        renderer = self._renderer if reasoned else self._bridger
        bridged = renderer.bridge_to_next_turn(
            list(prompt_ids), list(sampled_ids), list(new_messages), tools=self._specs(tools)
        )
        return None if bridged is None else bridged.token_ids

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> ParsedTurn:
        """What a sampled turn says. A tool call that `max_tokens` cut is not a call."""
        parsed = self._renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids))
        calls: list[ToolCall] = []
        invalid: list[str] = []
        for index, call in enumerate(parsed.tool_calls):
            if call.status == "ok" and isinstance(call.name, str) and isinstance(call.arguments, dict):
                calls.append(ToolCall(call.name, call.arguments, call.id or f"call_{index}"))
            else:
                invalid.append(call.raw)
        return ParsedTurn(
            parsed.content.strip(), (parsed.reasoning_content or "").strip(), tuple(calls), tuple(invalid)
        )

    @staticmethod
    def _specs(tools: Sequence[ToolSpec] | None) -> list[Any] | None:
        return list(tools) if tools else None
