"""Is generation fast? The torch engine against transformers on the same requests. Prints one JSON object a workload.

    python benchmarks/engine.py                                     # the bundled model, 256 requests
    python benchmarks/engine.py --model DIR --requests 64 --rounds 3

256 requests with 8 to 256 tokens each (drawn once, by `--seed`), at most 32 sequences at once, sampled at temperature 1
in float32 with one thread. Two workloads: all prompts distinct, and groups of 8 with the same prompt. Exact lengths are
forced on both sides. Transformers runs in these ways, each timed in every round, turn by turn with the engine:

    generate          static batches in order of arrival, sdpa, dynamic cache
    generate_static   the same with a static cache
    generate_batch    transformers' own continuous batching, sdpa
    generate_sorted   batches sorted by output length: an oracle, since nobody knows lengths beforehand

The ratio is to the best of the first three in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.device import compute_environment
from agentrl.tiny import tiny_model_path

REALISTIC = ("generate", "generate_static", "generate_batch")
MODES = ("engine", *REALISTIC, "generate_sorted")
SYSTEM = "You are a careful assistant. Think step by step and give the result in a box."


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: prompts as token ids, and how many tokens to sample for each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]


def workload(tokenizer: Any, name: str, requests: int, group_size: int, seed: int) -> Workload:
    """Chat prompts with one arithmetic question each; every prompt is asked `group_size` times."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(requests // group_size):
        a, b, c = rng.randrange(10, 1000), rng.randrange(10, 1000), rng.randrange(2, 10)
        question = f"Box {number} holds {a} apples and {b} pears. How many pieces of fruit are in {c} such boxes?"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts += [list(ids)] * group_size
    return Workload(name, prompts, [rng.randint(8, 256) for _ in prompts])


class EngineRunner:
    """The engine with all requests handed over at once."""

    def __init__(self, path: str, batch_size: int, max_model_len: int) -> None:
        self._path = path
        self._limits: dict[str, Any] = {"max_batch_size": batch_size, "max_model_len": max_model_len}

    def run(self, work: Workload) -> float:
        """Seconds for the whole workload in a new engine, so that nothing is left from the round before."""
        import numpy as np
        import torch

        from agentrl.engine.torch_engine import load_torch_engine
        from agentrl.record.protocols import GenerateRequest

        engine = load_torch_engine(self._path, dtype="float32", device=torch.device("cpu"), **self._limits)

        async def play() -> float:
            requests = [
                GenerateRequest(str(number), np.array(prompt, np.int32), length, 1.0, (), number)
                for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
            ]
            began = time.perf_counter()
            results = await asyncio.gather(*map(engine.generate, requests))
            seconds = time.perf_counter() - began
            await engine.close()
            _check([len(result.token_ids) for result in results], work.lengths)
            return seconds

        return asyncio.run(play())


class TransformersRunner:
    """transformers' generation with lengths forced row by row."""

    def __init__(self, path: str, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        model.eval().requires_grad_(False)
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
        self._model = model
        self._batch_size = batch_size

    def run(self, mode: str, work: Workload) -> float:
        order = list(range(len(work.prompts)))
        if mode == "generate_sorted":
            order.sort(key=lambda index: work.lengths[index])
        began = time.perf_counter()
        if mode == "generate_batch":
            self._continuous(work)
        else:
            for first in range(0, len(order), self._batch_size):
                self._static_batch(work, order[first : first + self._batch_size], mode == "generate_static")
        return time.perf_counter() - began

    def _static_batch(self, work: Workload, indices: list[int], static_cache: bool) -> None:
        import torch
        from transformers import StoppingCriteriaList

        prompts = [work.prompts[index] for index in indices]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ends = width + torch.tensor([work.lengths[index] for index in indices])

        def ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= ends

        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(work.lengths[index] for index in indices),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([ended]),
            **({"cache_implementation": "static"} if static_cache else {}),
        )
        _check([out.shape[1] - width], [max(work.lengths[index] for index in indices)])

    def _continuous(self, work: Workload) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=256, pad_token_id=0)
        pages = self._batch_size * -(-(max(map(len, work.prompts)) + 256) // 32)
        config = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=pages,
            max_batch_tokens=2048,
            max_requests_per_batch=self._batch_size,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        implementation = self._model.config._attn_implementation
        try:
            with self._model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=config
            ) as manager:
                for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
                    manager.add_request(prompt, request_id=str(number), max_new_tokens=length, eos_token_id=-1)
                counts = dict.fromkeys(map(str, range(len(work.prompts))), 0)
                ended = 0
                while ended < len(counts):
                    output = manager.get_result(timeout=60)
                    if output is None:
                        raise RuntimeError("generate_batch stalled")
                    if output.is_finished():
                        counts[output.request_id] = len(output.generated_tokens)
                        ended += 1
        finally:
            self._model.set_attn_implementation(implementation)
        _check(list(counts.values()), work.lengths)


def _check(counts: list[int], expected: list[int]) -> None:
    if counts != expected:
        raise RuntimeError(f"lengths were not kept: {counts[:8]}... instead of {expected[:8]}...")


def measure(work: Workload, runners: dict[str, Callable[[Workload], float]], rounds: int) -> dict[str, Any]:
    """Tokens per second of each way and their ratios, from rounds in which all ways take turns."""
    tokens = sum(work.lengths)
    seconds: dict[str, list[float]] = {mode: [] for mode in runners}
    for number in range(rounds):
        for mode in list(runners) if number % 2 == 0 else reversed(list(runners)):
            seconds[mode].append(runners[mode](work))
    report: dict[str, Any] = {
        "workload": work.name,
        "requests": len(work.lengths),
        "tokens": tokens,
        "prompt_tokens": sum(map(len, work.prompts)),
        "rounds": rounds,
        "tokens_per_s": {mode: _spread([tokens / second for second in values]) for mode, values in seconds.items()},
    }
    realistic = [mode for mode in REALISTIC if mode in runners]
    if "engine" in runners and realistic:
        best = [min(values) for values in zip(*(seconds[mode] for mode in realistic), strict=True)]
        report["ratio"] = _spread([theirs / own for theirs, own in zip(best, seconds["engine"], strict=True)])
    if "engine" in runners and "generate_sorted" in runners:
        pairs = zip(seconds["generate_sorted"], seconds["engine"], strict=True)
        report["ratio_to_oracle"] = _spread([theirs / own for theirs, own in pairs])
    return report


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(tiny_model_path()), help="a folder in the Hugging Face layout")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=20250101)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--workloads", nargs="+", choices=("distinct", "groups"), default=("distinct", "groups"))
    arguments = parser.parse_args()

    environment = compute_environment(1)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})

    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    works = [
        workload(tokenizer, name, arguments.requests, 8 if name == "groups" else 1, arguments.seed)
        for name in arguments.workloads
    ]
    longest = max(len(prompt) for work in works for prompt in work.prompts) + 256
    engine = EngineRunner(arguments.model, arguments.batch_size, longest)
    other = TransformersRunner(arguments.model, arguments.batch_size)
    warm = Workload("warm-up", works[0].prompts[:8], [4] * 8)
    runners: dict[str, Callable[[Workload], float]] = {}
    for mode in arguments.modes:
        runners[mode] = engine.run if mode == "engine" else lambda work, mode=mode: other.run(mode, work)
        runners[mode](warm)
    for work in works:
        report = {"model": os.path.basename(arguments.model), **measure(work, runners, arguments.rounds)}
        print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
