"""The bundled model: its tokenizer, its chat template, what it was taught and what the committed weights do."""

import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import Qwen3Renderer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, generate_problems, is_held_out
from agentrl.record.messages import Message, ToolSpec, with_compact_tools
from agentrl.tiny import tiny_model_path
from agentrl.tiny.dialogues import encode_dialogue, opening, solution, write_dialogues
from agentrl.tiny.evaluate import attempt_problems, summarise
from agentrl.tiny.supervise import Supervision
from agentrl.tiny.tokenizer import ADDED_TOKENS, VOCABULARY_SIZE

EVEN_TOOL_USE = {"+": 0.5, "-": 0.5, "*": 0.5}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """More threads than one make so small a model slower, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Qwen3Renderer:
    return Qwen3Renderer(tokenizer)


def test_importing_the_package_and_the_problems_is_light() -> None:
    code = (
        "import sys, agentrl.tiny, agentrl.envs.math.arithmetic\n"
        "sys.exit(bool({'torch', 'transformers', 'renderers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Tokenizer and chat template


def test_qwen3_added_tokens_end_the_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE
    first = VOCABULARY_SIZE - len(ADDED_TOKENS)
    for offset, token in enumerate(ADDED_TOKENS):
        assert tokenizer.encode(token, add_special_tokens=False) == [first + offset]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_byte_and_every_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len([token for token in tokenizer.get_vocab() if len(token) == 1]) == 256
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10


def test_the_tokenizer_says_how_the_model_is_prompted() -> None:
    config = json.loads((tiny_model_path() / "tokenizer_config.json").read_text())
    assert config["agentrl"] == {"renderer": "qwen3", "tool_prompt": "compact"}


def calls(*expressions: str, content: str = "") -> Message:
    functions = [{"name": "calculator", "arguments": {"expression": expression}} for expression in expressions]
    tool_calls = [{"type": "function", "id": f"call_{i}", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


USER: Message = {"role": "user", "content": "What is 12 + 34?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ANSWER: Message = {"role": "assistant", "content": "\\boxed{46}"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER],
        [SYSTEM, USER, ANSWER, USER],
        [SYSTEM, USER, calls("12 + 34"), tool("46")],
        [SYSTEM, USER, calls("12 + 34", content="Let me see: äöü"), tool("46"), ANSWER, USER],
        [USER, calls("1 + 2", "3 + 4"), tool("3"), tool("7")],
        [USER, calls("1 + 2"), tool("3"), calls("3 < 4 & 5"), tool('Error: "<"'), ANSWER, SYSTEM, USER],
    ],
)
def test_the_chat_template_gives_the_ids_of_the_renderer(
    tokenizer: PreTrainedTokenizerFast, renderer: Qwen3Renderer, messages: list[Message]
) -> None:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == renderer.render_ids(messages, add_generation_prompt=True)  # type: ignore[arg-type]


ADD_SPEC: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}},
    },
}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [{"role": "system", "content": ""}, USER]])
@pytest.mark.parametrize("tools", [[CALCULATOR_SPEC], [CALCULATOR_SPEC, ADD_SPEC]])
def test_the_chat_template_describes_tools_in_the_compact_form(
    tokenizer: PreTrainedTokenizerFast,
    renderer: Qwen3Renderer,
    messages: list[Message],
    tools: list[ToolSpec],
) -> None:
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)  # type: ignore[arg-type]
    described = with_compact_tools(messages, tools)
    assert ids == renderer.render_ids(described, add_generation_prompt=True)  # type: ignore[arg-type]


def test_prompts_are_short(renderer: Qwen3Renderer) -> None:
    assert len(renderer.render_ids(opening("")[:1])) <= 50  # type: ignore[arg-type]


# Dialogues


def generated_turn_by_turn(
    renderer: Qwen3Renderer, tokenizer: PreTrainedTokenizerFast, dialogue: list[Message]
) -> tuple[list[int], list[bool]]:
    """The ids of a dialogue as a rollout collects them, and which of them were sampled."""
    ids: list[int] = []
    sampled: list[bool] = []
    prompt: list[int] = []
    completion: list[int] = []
    seen = 0
    for index, message in enumerate(dialogue):
        if message["role"] != "assistant":
            continue
        bridge = renderer.bridge_to_next_turn(prompt, completion, dialogue[seen:index])  # type: ignore[arg-type]
        rendered = renderer.render_ids(dialogue[:index], add_generation_prompt=True)  # type: ignore[arg-type]
        prompt = rendered if bridge is None else bridge.token_ids
        assert prompt == rendered
        assert prompt[: len(ids)] == ids
        completion = tokenizer.encode(completion_text(message), add_special_tokens=False)
        sampled += [False] * (len(prompt) - len(ids)) + [True] * len(completion)
        ids = prompt + completion
        seen = index + 1
    return ids, sampled


def completion_text(message: Message) -> str:
    """What the model writes for an assistant message, spelled out here to pin the format."""
    if "tool_calls" not in message:
        return message["content"] + "<|im_end|>"
    expression = message["tool_calls"][0]["function"]["arguments"]["expression"]
    call = '{"name": "calculator", "arguments": {"expression": "' + expression + '"}}'
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def test_dialogues_are_trained_on_the_ids_that_generation_gives(
    renderer: Qwen3Renderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    lengths = set()
    for dialogue in write_dialogues(100, seed=0, tool_use=EVEN_TOOL_USE):
        trained = encode_dialogue(renderer, dialogue)
        assert (trained.token_ids, trained.sampled) == generated_turn_by_turn(renderer, tokenizer, dialogue)
        assert not {"<think>", "</think>"} & set(tokenizer.convert_ids_to_tokens(trained.token_ids))
        lengths.add(len(dialogue))
    assert lengths == {3, 5, 7, 9}


def test_dialogues_are_determined_by_their_seed_and_hold_no_tested_problem() -> None:
    dialogues = list(write_dialogues(50, seed=1, tool_use={"+": 1.0, "-": 1.0, "*": 1.0}))
    assert dialogues == list(write_dialogues(50, seed=1, tool_use={"+": 1.0, "-": 1.0, "*": 1.0}))
    for message in (message for dialogue in dialogues for message in dialogue if "tool_calls" in message):
        a, operator, b = message["tool_calls"][0]["function"]["arguments"]["expression"].split()
        assert not is_held_out(int(a), operator, int(b))


def test_solutions_end_in_the_gold_box() -> None:
    for problem in generate_problems("train", 20, seed=0):
        for with_tool in (False, True):
            assert solution(problem, with_tool)[-1]["content"] == f"\\boxed{{{problem.answer}}}"


def test_the_learning_rate_rises_stays_and_falls() -> None:
    plan = Supervision(steps=1000)
    rates = [plan.learning_rate_at(step) for step in (0, 49, 600, 800, 999)]
    assert rates[1] == rates[2] == plan.learning_rate
    assert rates[0] == pytest.approx(plan.learning_rate / 50)
    assert rates[2] > rates[3] > rates[4] > 0.03 * plan.learning_rate


# The committed weights


def test_weights_are_small_and_in_bfloat16() -> None:
    assert sum(path.stat().st_size for path in tiny_model_path().iterdir()) < 5_000_000
    with safe_open(tiny_model_path() / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) <= 2_000_000


def test_the_policy_calls_or_guesses_and_is_right_after_a_call(renderer: Qwen3Renderer) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    attempts = attempt_problems(model, renderer, generate_problems("test", 128, seed=7), sample=True)
    shares = summarise(attempts)
    assert 0.15 < shares["accuracy"] < 0.55
    assert 0.15 < shares["tool_use"] < 0.55
    assert shares["accuracy_with_tool"] > 0.9


def test_the_recorded_accuracies_leave_room_to_learn() -> None:
    report = json.loads((tiny_model_path() / "build.json").read_text())
    for mode in ("sampled", "greedy"):
        shares = report["held_out"]["test"][mode]
        assert shares["problems"] >= 512
        assert 0.2 <= shares["accuracy"] <= 0.45
        assert shares["accuracy_with_tool"] >= 0.97
    card = (tiny_model_path() / "README.md").read_text()
    assert f"{report['held_out']['test']['sampled']['accuracy']:.1%}" in card
    assert "one decision" in card


@pytest.mark.full
def test_a_build_writes_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.tiny import build

    monkeypatch.setattr(build, "HELD_OUT_PROBLEMS", 8)
    report = build.build(tmp_path, seed=0, plan=Supervision(steps=4))
    assert report["parameters"] == AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    assert json.loads((tmp_path / "build.json").read_text()) == report
    assert (tmp_path / "tokenizer.json").read_text() == (tiny_model_path() / "tokenizer.json").read_text()
