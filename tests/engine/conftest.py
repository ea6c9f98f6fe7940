"""Small random models, the real engine on them, and transformers' own forward to compare with."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from agentrl.engine.sglang_engine import SglangEngine
from agentrl.engine.sglang_server import SglangServer
from agentrl.engine.torch_engine import TorchEngine
from agentrl.record.protocols import GenerateRequest
from agentrl.tiny import tiny_model_path
from agentrl.weights.disk import DiskSender
from tests.support.models import random_model
from tests.support.sglang_server import ProtocolServer

torch.set_num_threads(1)

VOCABULARY = 97


@pytest.fixture(scope="session")
def new_model() -> Callable[..., Any]:
    """`new_model(family="qwen3", seed=0)`: a random model whose distributions are far from uniform."""

    def build(family: str = "qwen3", seed: int = 0) -> Any:
        return random_model(family, seed, vocab_size=VOCABULARY, max_position_embeddings=1024, initializer_range=0.25)

    return build


@pytest.fixture(scope="session")
def start_engine() -> Callable[..., Any]:
    """`async with start_engine(model, max_batch_size=4) as engine`: an engine on a copy of the model."""

    @asynccontextmanager
    async def start(
        model: Any, *, max_batch_size: int = 4, max_model_len: int = 1024, **options: Any
    ) -> AsyncIterator[TorchEngine]:
        engine = TorchEngine(
            copy.deepcopy(model), max_batch_size=max_batch_size, max_model_len=max_model_len, **options
        )
        try:
            yield engine
        finally:
            await engine.close()

    return start


@pytest.fixture(scope="session")
def request_of() -> Callable[..., GenerateRequest]:
    """`request_of(ids, seed=1, max_tokens=8, ...)`: a request whose id is its seed unless it is given one."""

    def build(
        ids: Sequence[int],
        *,
        seed: int = 0,
        max_tokens: int = 8,
        temperature: float = 1.0,
        stop: tuple[int, ...] = (),
        min_version: int = 0,
        request_id: str | None = None,
        stop_texts: tuple[str, ...] = (),
        top_p: float = 1.0,
        top_k: int = -1,
        json_schema: str = "",
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"r{seed}" if request_id is None else request_id,
            token_ids=np.asarray(ids, np.int32),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop,
            seed=seed,
            min_version=min_version,
            stop=stop_texts,
            top_p=top_p,
            top_k=top_k,
            json_schema=json_schema,
        )

    return build


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """`prompt(length, seed)`: random token ids."""

    def build(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng((length, seed)).integers(VOCABULARY, size=length).tolist()

    return build


@pytest.fixture(scope="session")
def reference_logprobs() -> Callable[..., np.ndarray]:
    """`reference_logprobs(model, prompt, answer, temperature)`: the answer's log-probs by transformers itself."""

    @torch.no_grad()
    def compute(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits.float() / temperature, dim=-1)
        return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()

    return compute


class Steps:
    """Holds an engine's steps where a test wants them: counted from 1, each one model forward."""

    def __init__(self, engine: TorchEngine) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._hold_at: int | None = None
        engine._batch._model.register_forward_pre_hook(self._before_step)

    def hold_at(self, step: int) -> None:
        """That step will not compute before `release`."""
        with self._changed:
            self._hold_at = step

    def reached(self) -> None:
        """Returns when the engine stands before the step to hold at."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._hold_at is not None and self._count >= self._hold_at, 20)

    def release(self) -> None:
        with self._changed:
            self._hold_at = None
            self._changed.notify_all()

    def _before_step(self, *_: Any) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._hold_at is None or self._count < self._hold_at, 20)


@pytest.fixture(scope="session")
def steps_of() -> Callable[[TorchEngine], Steps]:
    """`steps_of(engine)`: a handle on the engine's steps."""
    return Steps


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model folder with the config that belongs to updates."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def serve(model_path: Path) -> Callable[..., Any]:
    """`async with serve(keeps_cache=True) as (engine, server)`: an engine on a server of its own."""

    @asynccontextmanager
    async def start(*, seconds: float = 10.0, **options: Any) -> AsyncIterator[tuple[SglangEngine, ProtocolServer]]:
        server = ProtocolServer({"weight_version": "0"})
        await server.start()
        options = {"max_model_len": 1024, "vocabulary": 97, "keeps_cache": False, **options}
        engine = SglangEngine(SglangServer(server.url), str(model_path), timeout=seconds, **options)
        try:
            yield engine, server
        finally:
            await engine.close()
            await server.die()

    return start


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Any]:
    """`await publish(engine, version)`: a whole update through files; its weights are those of that version."""
    sender = DiskSender(tmp_path / "updates", 256)

    async def update(engine: SglangEngine, version: int, *, weight: float | None = None) -> None:
        tensors = [(f"layer.{i}", torch.full((40,), float(version))) for i in range(5)]
        tensors.insert(2, ("weight", torch.full((3, 4), float(version if weight is None else weight))))
        await engine.pause()
        await engine.start_weight_update()
        await sender.send(tensors, engine.update_weights)
        await engine.finish_weight_update(version)
        await engine.resume()

    return update


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Of the bundled model."""
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture
def ask(request_of: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """`ask(schema, seed=3)`: a request for a value; without a schema for any text."""
    messages = [{"role": "user", "content": "What is 12 + 30? Answer in JSON."}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def build(schema: Any = None, **changes: Any) -> Any:
        text = "" if schema is None else schema if isinstance(schema, str) else json.dumps(schema)
        return request_of(ids, **{"stop": (end,), "max_tokens": 120, "json_schema": text, **changes})

    return build
