"""Stop texts end a turn with the token that completes them, however text and tokens are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl.engine.stop_text import StopText
from agentrl.engine.torch_engine import load_torch_engine
from agentrl.record import EngineError
from agentrl.tiny import tiny_model_path

Fixture = Callable[..., Any]


def of_bytes(*tokens: bytes) -> Callable[[list[int]], str]:
    """A decoder of tokens that stand for these bytes."""
    return lambda ids: b"".join(tokens[token] for token in ids).decode(errors="replace")


def tokens_until(texts: tuple[str, ...], tokens: list[bytes]) -> int | None:
    """How many tokens it takes until a text is found, as the incremental search sees it."""
    stop_text = StopText(texts, of_bytes(*tokens))
    return next((count + 1 for count in range(len(tokens)) if stop_text.ends_with(count)), None)


@pytest.mark.parametrize(
    ("texts", "tokens", "count"),
    [
        (("stop",), [b"a", b"stop", b"b"], 2),
        (("stop",), [b"a st", b"o", b"p", b"b"], 3),
        (("stop",), [b"s", b"sto", b"st", b"op and more", b"b"], 4),
        (("stop",), [b"st", b"-", b"op"], None),
        (("\n\n",), [b"a\n", b"b\n", b"\nc"], 3),
        (("x", "bc"), [b"ab", b"cx"], 2),
        (("é",), [b"a\xc3", b"\xa9b"], 2),
        (("é",), [b"\xc3", b"a\xa9"], None),
        (("🙂!",), [b"\xf0", b"\x9f\x99", b"\x82", b"!", b"b"], 4),
        (("b",), [b"\xf0", b"\x9f", b"a", b"b"], 4),
        (("</answer>",), [b"<", b"/", b"ans", b"wer", b">\xf0"], 5),
    ],
)
def test_the_completing_token_is_found(texts: tuple[str, ...], tokens: list[bytes], count: int | None) -> None:
    assert tokens_until(texts, tokens) == count


@given(st.lists(st.sampled_from("ab é🙂\n"), min_size=1, max_size=40), st.data())
def test_any_cut_of_any_text(characters: list[str], data: st.DataObject) -> None:
    text = "".join(characters)
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(encoded)), max_size=20)) | {len(encoded)})
    tokens = [encoded[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]
    stops = tuple(data.draw(st.lists(st.text("ab é🙂\n", min_size=1, max_size=4), min_size=1, max_size=3)))
    found = [encoded[: sum(map(len, tokens[:count]))].decode(errors="ignore") for count in range(1, len(tokens) + 1)]
    expected = next((n + 1 for n, so_far in enumerate(found) if any(stop in so_far for stop in stops)), None)
    assert tokens_until(stops, tokens) == expected


def test_only_a_tail_is_decoded_again() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "word " * len(ids)

    stop_text = StopText(("never",), decode)
    assert not any(stop_text.ends_with(token) for token in range(1000))
    assert longest <= 2


def test_a_first_token_that_decodes_differently() -> None:
    """As with sentencepiece, where the space of a first word is not part of the text."""
    words = ["▁the", "▁end", "▁is", "▁near"]

    def decode(ids: list[int]) -> str:
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    for stop, count in (("the end", 2), ("end is", 3), ("theend", None), (" the", None), ("d is n", 4)):
        stop_text = StopText((stop,), decode)
        assert next((n + 1 for n in range(4) if stop_text.ends_with(n)), None) == count


def test_the_engine_ends_the_turn_and_keeps_the_tokens(
    new_model: Fixture, start_engine: Fixture, request_of: Fixture, prompt: Fixture
) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    async def play() -> None:
        async with start_engine(new_model(), decode=decode) as engine:
            free = (await engine.generate(request_of(prompt(5), seed=3, max_tokens=20))).token_ids.tolist()
            text = decode(free[6:9])[1:-1]
            result, other = await asyncio.gather(
                engine.generate(request_of(prompt(5), seed=3, max_tokens=20, stop_texts=("absent", text))),
                engine.generate(request_of(prompt(5), seed=3, max_tokens=20, request_id="other")),
            )
            assert result.token_ids.tolist() == free[:9] and result.finish_reason == "stop"
            assert len(result.logprobs) == len(result.versions) == 9
            assert other.token_ids.tolist() == free and other.finish_reason == "length"
            at_the_limit = await engine.generate(request_of(prompt(5), seed=3, max_tokens=9, stop_texts=(text,)))
            assert at_the_limit.finish_reason == "stop"
            with pytest.raises(EngineError, match="empty"):
                await engine.generate(request_of(prompt(5), stop_texts=("a", "")))

    asyncio.run(play())


def test_a_loaded_engine_knows_the_models_tokenizer(request_of: Fixture) -> None:
    path = str(tiny_model_path())
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    async def play() -> None:
        device = torch.device("cpu")
        engine = load_torch_engine(path, dtype="float32", device=device, max_batch_size=2, max_model_len=256)
        free = await engine.generate(request_of(ids, max_tokens=24, temperature=0))
        text = tokenizer.decode(free.token_ids[3:6].tolist())
        result = await engine.generate(request_of(ids, max_tokens=24, temperature=0, stop_texts=(text,)))
        assert result.finish_reason == "stop" and text in tokenizer.decode(result.token_ids.tolist())
        assert text not in tokenizer.decode(result.token_ids[:-1].tolist())
        special = await engine.generate(request_of(ids, max_tokens=200, temperature=0, stop_texts=("<|im_end|>",)))
        assert special.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        await engine.close()

    asyncio.run(play())


def test_a_model_without_a_tokenizer_serves_requests_without_stop_texts(
    tmp_path: Any, new_model: Fixture, request_of: Fixture
) -> None:
    new_model().save_pretrained(tmp_path)

    async def play() -> None:
        engine = load_torch_engine(
            str(tmp_path), dtype="float32", device=torch.device("cpu"), max_batch_size=2, max_model_len=64
        )
        assert len((await engine.generate(request_of([1, 2]))).token_ids) == 8
        with pytest.raises(EngineError, match="no tokenizer"):
            await engine.generate(request_of([1, 2], stop_texts=("x",)))
        await engine.close()

    asyncio.run(play())
