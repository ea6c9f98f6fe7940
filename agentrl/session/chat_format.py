"""Messages to token ids and back, for one model."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.record import Message, MessageError, ToolSpec
from agentrl.session.families import renderer_config
from agentrl.session.forced_calls import PROBE_CALL, PROBE_HISTORY, PROBE_RESULT, PROBE_TOOL, CallFrame
from agentrl.session.package_format import PackageFormat
from agentrl.session.template_format import TemplateFormat
from agentrl.session.turns import Format, ParsedTurn, SampledTurn

_KEPT_PROMPTS = 64


class ChatFormat:
    """How one model's conversations look as tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        form: of the model's family (`PackageFormat`), or of its chat template (`TemplateFormat`).
    """

    def __init__(self, tokenizer: Any, form: Format) -> None:
        self.tokenizer = tokenizer
        self._form = form
        self._first_prompts: OrderedDict[str, array[int]] = OrderedDict()
        self.stop_token_ids: tuple[int, ...] = form.stop_token_ids

    @classmethod
    def load(cls, config: ModelConfig, path: str) -> ChatFormat:
        """The format of the model in `path`, as `config` wants it.

        Raises:
            OSError: no tokenizer there.
            ValueError: an unknown renderer; the message lists the known ones.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls.of(tokenizer, config, stop_token_ids=_generation_stop_ids(path))

    @classmethod
    def of(cls, tokenizer: Any, config: ModelConfig, *, stop_token_ids: Sequence[int] = ()) -> ChatFormat:
        """The format of a tokenizer at hand; `stop_token_ids` are further ids that end a turn. Errors as in `load`."""
        asked = tokenizer.init_kwargs.get("agentrl") or {}
        name = asked.get("renderer", "auto") if config.renderer == "auto" else config.renderer
        tool_prompt = asked.get("tool_prompt", "auto") if config.tool_prompt == "auto" else config.tool_prompt
        renderer = renderer_config(tokenizer, name)
        form: Format
        if renderer is None:
            form = TemplateFormat(tokenizer, tool_prompt=tool_prompt, stop_token_ids=stop_token_ids)
        else:
            form = PackageFormat(tokenizer, renderer, compact_tools=tool_prompt == "compact")
        return cls(tokenizer, form)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> list[int]:
        """The prompt for the next assistant turn, from nothing.

        Raises:
            MessageError: the model's template refuses the messages.
        """
        if any(message["role"] == "assistant" for message in messages):
            return self._form.render(messages, tools or ())
        # The episodes of a group begin with the same prompt, and often at the same time.
        try:
            key = json.dumps([list(messages), list(tools or ())])
        except (TypeError, ValueError):
            return self._form.render(messages, tools or ())
        known = self._first_prompts.get(key)
        if known is None:
            known = self._first_prompts[key] = array("i", self._form.render(messages, tools or ()))
        self._first_prompts.move_to_end(key)
        if len(self._first_prompts) > _KEPT_PROMPTS:
            self._first_prompts.popitem(last=False)
        return known.tolist()

    def bridge(
        self, turn: SampledTurn, new_messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None
    ) -> list[int] | None:
        """The prompt for the turn after `new_messages`, on top of exactly the tokens of `turn`.

        None where the template does not allow that (it strips earlier reasoning, say): then render from nothing,
        and the message graph forks.
        """
        return self._form.bridge(turn, new_messages, tools or ())

    def parse(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[ToolSpec] | None = None
    ) -> ParsedTurn:
        """What a sampled turn says. A tool call that `max_tokens` cut is not a call."""
        return self._form.parse(prompt_ids, token_ids, tools or ())

    def encode(self, text: str) -> list[int]:
        """Token ids of a part of a rendered conversation, with special tokens where it has their names."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """What token ids say, special tokens and the marks of tool calls included, but no stop token at their end."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def longest_token(self) -> int:
        """Most characters that a token stands for."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def call_frame(self) -> CallFrame | None:
        """How the model writes a tool call; None if not as JSON that could be sampled by a schema."""
        try:
            prompt = self._form.render(PROBE_HISTORY, [PROBE_TOOL])
            whole = self._form.render([*PROBE_HISTORY, PROBE_CALL, PROBE_RESULT], [PROBE_TOOL])
        except MessageError:
            return None
        if whole[: len(prompt)] != prompt:
            return None
        turn = whole[len(prompt) :]
        end = next((place for place, token in enumerate(turn) if token in self.stop_token_ids), len(turn))
        return CallFrame.found_in(self.decode(turn[:end]))


def _generation_stop_ids(path: str) -> tuple[int, ...]:
    """The ids that end a turn by a model's `generation_config.json`."""
    from transformers import GenerationConfig

    file = Path(path) / "generation_config.json"
    try:
        values: Any = json.loads(file.read_text()) if file.parent.is_dir() else GenerationConfig.from_pretrained(path)
    except (OSError, ValueError):
        return ()
    ids = values.get("eos_token_id") if isinstance(values, dict) else values.eos_token_id
    return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (ids,)
