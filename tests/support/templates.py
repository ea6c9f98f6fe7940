"""Chat templates in the manner of the big families; the bundled model's tokenizer, with other tokens for each."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from renderers import create_renderer
from renderers.configs import config_from_name
from transformers import AutoTokenizer

from agentrl.config.schema import ModelConfig
from agentrl.session import ChatFormat
from agentrl.tiny import tiny_model_path

_CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_HERMES = """\
{%- set leads = messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + (messages[0].content if leads else 'You help.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nCall one with\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in (messages[1:] if leads else messages) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""

_THINKING = """\
{%- set ns = namespace(asked=0) -%}
{%- for tool in tools or [] %}{{ '<|im_start|>tool\\n' + tool | tojson + '<|im_end|>\\n' }}{% endfor -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.asked -%}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
        {{- '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_LLAMA3 = """\
{{- bos_token }}{%- set leads = messages[0].role == 'system' -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif -%}
{{- 'Today Date: ' + date_string + '\\n\\n' + (messages[0].content | trim if leads else '') + '<|eot_id|>' -}}
{%- set ns = namespace(told=not tools) -%}
{%- for message in (messages[1:] if leads else messages) -%}
    {%- if message.role == 'tool' -%}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' -}}
    {%- elif message.tool_calls -%}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
        {{- call.arguments | tojson + '}<|eot_id|>' -}}
    {%- else -%}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
        {%- if not ns.told and message.role == 'user' -%}
            {%- set ns.told = true -%}
            {{- 'Respond with {"name": name, "parameters": arguments}\\n\\n' -}}
            {%- for tool in tools %}{{ tool | tojson + '\\n\\n' }}{% endfor -%}
        {%- endif -%}
        {{- message.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

_MISTRAL = """\
{{- bos_token -}}{%- set ns = namespace(turn=0, last=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) -%}
            {{- raise_exception('roles must alternate between user and assistant') -}}
        {%- endif -%}
        {%- set ns.turn = ns.turn + 1 -%}
    {%- endif -%}
    {%- if message.role == 'system' -%}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {%- if tools and loop.index0 == ns.last -%}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' + message.content + '[/INST]' -}}
    {%- elif message.tool_calls -%}
        {{- '[TOOL_CALLS][' -}}
        {%- for call in message.tool_calls -%}
            {%- if call.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif -%}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}
            {{- ', ' if not loop.last else '' -}}
        {%- endfor -%}
        {{- ']' + eos_token -}}
    {%- elif message.role == 'tool' -%}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif -%}
        {{- '[TOOL_RESULTS]' + {'content': message.content, 'call_id': message.tool_call_id} | tojson -}}
        {{- '[/TOOL_RESULTS]' -}}
    {%- else -%}{{- message.content + eos_token -}}{%- endif -%}
{%- endfor -%}
"""

_GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user/assistant') -}}
    {%- endif -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

_PHI = """\
{%- for message in messages -%}
    {%- if message.role in ('system', 'user', 'assistant') -%}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

_ZEPHYR = """\
{%- for message in messages -%}
    {%- if message.role in ('user', 'system', 'assistant') -%}
        {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
"""

_DEEPSEEK_R1 = """\
{{- bos_token -}}
{%- for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% endif %}{% endfor -%}
{%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
    {%- elif message.role == 'tool' -%}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' -}}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' -}}
            {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' -}}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif -%}
"""

_GLM = """\
{{- '[gMASK]<sop>' -}}
{%- if tools %}{{ '<|system|>\\n# Tools' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- else -%}
        {{- '<|' + message.role + '|>\\n' + message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n<tool_call>' + call.function.name -}}
            {%- for key, value in call.function.arguments.items() -%}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
                {{- (value if value is string else value | tojson) + '</arg_value>' -}}
            {%- endfor -%}
            {{- '\\n</tool_call>' -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
"""

_LLAMA2 = """\
{%- for message in messages -%}
    {%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant') }}{% endif -%}
{%- endfor -%}
"""

_SCRIPT = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif -%}
"""

_USERS_END = """\
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{{- eos_token if message.role != 'assistant' else '' }}{{ '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template and the tokens it needs.

    Attributes:
        eos: what the tokenizer calls the end, which need not be what ends a turn.
        stop: what ends a turn of the model; empty where the template marks no ends.
        special, markup: tokens the vocabulary gets; the latter remain part of the text.
        alternates: refuses two messages of a role in a row.
        bridges: whether a turn of plain text can be built upon.
    """

    template: str
    eos: str = "</s>"
    stop: str = "</s>"
    special: tuple[str, ...] = ("<s>", "</s>")
    markup: tuple[str, ...] = ()
    system: bool = True
    alternates: bool = False
    bridges: bool = True


FAMILIES = {
    "chatml": Family(_CHATML, "<|im_end|>", "<|im_end|>"),
    "hermes": Family(_HERMES, "<|endoftext|>", "<|im_end|>"),
    "thinking": Family(_THINKING, "<|im_end|>", "<|im_end|>"),
    "llama-3": Family(
        _LLAMA3,
        "<|end_of_text|>",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": Family(
        _MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        alternates=True,
    ),
    "gemma": Family(
        _GEMMA,
        "<eos>",
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        system=False,
        alternates=True,
    ),
    "phi": Family(_PHI, "<|end_of_doc|>", "<|end|>", ("<|end_of_doc|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "zephyr": Family(_ZEPHYR),
    "deepseek-r1": Family(
        _DEEPSEEK_R1,
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ),
    "glm": Family(
        _GLM,
        "<|endoftext|>",
        "<|user|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama-2": Family(_LLAMA2, system=False),
    "script": Family(_SCRIPT, stop="", bridges=False),
    "users-end": Family(_USERS_END, stop="", bridges=False),
}


def tokenizer_for(
    special: tuple[str, ...] = (), markup: tuple[str, ...] = (), template: str = "", eos: str = ""
) -> Any:
    """The bundled tokenizer with further tokens and another template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.init_kwargs.pop("agentrl", None)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(list(markup))
    tokenizer.chat_template = template or None
    tokenizer.eos_token = eos or tokenizer.eos_token
    tokenizer.bos_token = next((token for token in special if "begin" in token or token in ("<s>", "<bos>")), None)
    return tokenizer


@cache
def package_tokenizer(renderer: str) -> Any:
    """The bundled tokenizer with the tokens that a renderer of the package `renderers` asks for."""
    tokenizer = tokenizer_for()
    config: Any = config_from_name(renderer)
    while True:
        try:
            create_renderer(tokenizer, config)
            return tokenizer
        except (AssertionError, ValueError) as error:
            (missing,) = re.findall(r"(?:token|for) ('[^']+')", str(error))[:1]
            tokens = {"additional_special_tokens": [ast.literal_eval(missing)]}
            tokenizer.add_special_tokens(tokens, replace_extra_special_tokens=False)


def family_format(name: str, **keys: str) -> ChatFormat:
    """The format of a family, from nothing but its tokenizer and template; `keys` are of `model`."""
    family = FAMILIES[name]
    tokenizer = tokenizer_for(family.special, family.markup, family.template, family.eos)
    return ChatFormat.of(tokenizer, ModelConfig.model_validate({"path": "x", **keys}))
