"""A real vLLM on small random models, one after the other in an event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.record.protocols import GenerateRequest
from agentrl.tiny import tiny_model_path
from agentrl.weights.shm import ShmSender

torch.set_num_threads(1)


class Background:
    """An event loop in a thread: engines outlive the tests that use them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)


@pytest.fixture(scope="session")
def background() -> Background:
    return Background()


def models() -> list[Any]:
    """The bundled model, and three with other weights of the same shapes, far from it and from each other."""
    made = []
    for seed in range(4):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters() if seed else ():
                parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())
        made.append(model.eval().requires_grad_(False))
    return made


@pytest.fixture(scope="session")
def weights() -> list[Any]:
    return models()


@pytest.fixture(scope="session")
def start(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`start("rollout.kv_on_update=keep", index=0)`: an engine as a run would start it."""
    from agentrl.engine.load import load_engine

    def begin(*overrides: str, index: int = 0, model: Path | None = None) -> Any:
        config = load_config(
            {
                "model": {"path": "tiny"},
                "data": {"train": "agentrl.envs.math:arithmetic_tasks", "max_prompt_length": 256},
                "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
                "rollout": {"engine": "vllm", "max_model_len": 1024, "max_batch_size": 16, "kv_cache_tokens": 32768},
                "trainer": {"total_steps": 1, "device": "cpu"},
            },
            list(overrides),
        )
        path, scratch = str(model or tiny_model_path()), tmp_path_factory.mktemp("scratch")
        return background.run(load_engine(config, path, index, scratch))

    return begin


@pytest.fixture(scope="session")
def engine(start: Callable[..., Any], background: Background) -> Iterator[Any]:
    """One engine for many tests; each leaves it running, with whatever weights it gave it."""
    made = start()
    yield made
    background.run(made.close())


_versions = iter(range(1, 10**6))


async def send_weights(engine: Any, sender: Any, tensors: Any, version: int) -> None:
    """A whole update."""
    await engine.pause()
    await engine.start_weight_update()
    await sender.send(tensors, engine.update_weights)
    await engine.finish_weight_update(version)
    await engine.resume()


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Any]:
    """`await publish(engine, model)`: a whole update through shared memory; returns its version."""
    sender = ShmSender(tmp_path, 200_000)

    async def update(engine: Any, model: Any, *, sender: Any = sender) -> int:
        version = next(_versions)
        await send_weights(engine, sender, model.named_parameters(), version)
        return version

    return update


def request_of(ids: Sequence[int], number: int = 0, **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop_token_ids": (), "seed": number}
    values |= {"request_id": f"r{number}", "token_ids": np.asarray(ids, np.int32), **changes}
    return GenerateRequest(**values)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(990, size=length).tolist()


async def until_sampling(engine: Any, call: asyncio.Task[Any]) -> None:
    """Returns when the engine has sampled more tokens than when it was called, or the call is over."""
    before = (await engine.stats()).generated_tokens
    while (await engine.stats()).generated_tokens == before and not call.done():  # noqa: ASYNC110  it does not say
        await asyncio.sleep(0.01)


@torch.no_grad()
def expected_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
