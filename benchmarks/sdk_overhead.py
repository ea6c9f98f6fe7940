"""What does the SDK cost? An `AgentLoop` on vLLM against bare vLLM on the same prompts. One JSON object a workload.

    .venv-vllm/bin/python benchmarks/sdk_overhead.py                 # the bundled model and SmolLM2
    .venv-vllm/bin/python benchmarks/sdk_overhead.py --models smollm2 --rounds 3

Three ways take turns in every round, each with an empty prefix cache, and must sample the same number of tokens:

    agent      episodes of a multi-turn agent, all at once, through EpisodeRunner, session, chat template and VllmEngine
    async      their requests once more on the same AsyncLLM: each turn of an episode after the one before it
    offline    their requests once more in one call of `LLM.generate` of a second vLLM with the same settings

Answers have a fixed length. Shares are tokens per second of `agent` over those of the other, of the same round. The
cost of a turn and of a token is what `agent` takes more than `async`, in processor time of this process, which is less
noisy than the clock's: the first two workloads of a model have as many turns and other lengths, which is two equations.
Answers that go on past their end mark are not continued token by token: many turns are rendered anew here, which costs
more than turns of a run do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reporting import report, spread

from agentrl import AgentLoop, Policy, Task
from agentrl.config import RunConfig, load_config
from agentrl.device import compute_environment
from agentrl.engine.vllm_engine import VllmEngine, sampling_parameters
from agentrl.models import resolve_model
from agentrl.record.protocols import GenerateRequest, GenerateResult
from agentrl.rollout.episode import EpisodeRunner, Plugins
from agentrl.session import ChatFormat

Chains = list[list[GenerateRequest]]
"""Requests by episode, in the order of its turns."""
SIZES = {"tiny": [(16, 4, 16), (16, 4, 128), (16, 16, 16)], "smollm2": [(16, 4, 32)]}
"""Episodes, turns of each, and tokens of a turn."""
_REST_SECONDS = 1.5
"""Before each pass: the workers of the vLLM that had its turn before poll for a second more."""


class Talk(AgentLoop):
    """Asks one question after the other."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, task: Task, policy: Policy) -> float:
        messages = task.messages()
        for turn in range(self._turns):
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": f"And what is {turn} + {task.index}?"}]
        return 1.0


class Recording:
    """An engine whose answers all have the same length. It remembers what it was asked.

    Attributes:
        chains: of the episodes so far.
    """

    def __init__(self, engine: VllmEngine, tokens: int) -> None:
        self.chains: dict[str, list[GenerateRequest]] = defaultdict(list)
        self._engine = engine
        self._tokens = tokens

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        own = replace(request, max_tokens=self._tokens, stop_token_ids=())
        self.chains[request.request_id.rpartition(":")[0]].append(own)
        return await self._engine.generate(own)


@dataclass
class Bench:
    """One model on two vLLMs: the engine of a run, and one without agentrl."""

    config: RunConfig
    chat_format: ChatFormat
    engine: VllmEngine
    llm: Any
    offline: Any

    async def agent(self, episodes: int, turns: int, tokens: int) -> tuple[int, Chains]:
        """Plays the episodes; returns how many tokens they sampled, and what they asked."""
        recording = Recording(self.engine, tokens)
        plugins = {"default": Plugins(Talk, None, {"turns": turns})}
        runner = EpisodeRunner(self.config, plugins, self.chat_format, recording)
        tasks = [Task(f"What is {index} + 7?", index=index, split="val") for index in range(episodes)]
        outcomes = await asyncio.gather(
            *(runner.play(task, group_id="g", episode_id=f"g.{task.index}", version=0) for task in tasks)
        )
        sampled = 0
        for outcome in outcomes:
            if outcome.trajectory is None or outcome.failure is not None:
                raise RuntimeError(f"an episode ended with {outcome.failure}: {outcome.reason}")
            sampled += outcome.trajectory.sampled_tokens
        return sampled, list(recording.chains.values())

    async def bare(self, chains: Chains) -> int:
        """The same requests on the engine's AsyncLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        names = itertools.count()

        async def play(chain: list[GenerateRequest]) -> int:
            sampled = 0
            for request in chain:
                parameters = SamplingParams(
                    **sampling_parameters(request), flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
                )
                prompt = {"prompt_token_ids": request.token_ids.tolist()}
                async for output in self.llm.generate(prompt, parameters, f"bare-{next(names)}"):
                    sampled += len(output.outputs[0].token_ids)
            return sampled

        return sum(await asyncio.gather(*map(play, chains)))

    async def generate(self, chains: Chains) -> int:
        """The same requests in the second vLLM, those of first turns first."""
        from vllm import SamplingParams

        requests = [request for turn in itertools.zip_longest(*chains) for request in turn if request is not None]
        prompts = [{"prompt_token_ids": request.token_ids.tolist()} for request in requests]
        parameters = [SamplingParams(**sampling_parameters(request), flat_logprobs=True) for request in requests]
        outputs = await asyncio.to_thread(self.offline.generate, prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    async def measure(self, episodes: int, turns: int, tokens: int, rounds: int) -> dict[str, list[Any]]:
        """Seconds of each way and round: on the clock, and of this process's processor time."""
        taken: dict[str, list[Any]] = defaultdict(list)
        chains: Chains = []

        async def agent() -> int:
            nonlocal chains
            sampled, chains = await self.agent(episodes, turns, tokens)
            return sampled

        ways: dict[str, Callable[[], Awaitable[int]]] = {
            "agent": agent,
            "async": lambda: self.bare(chains),
            "offline": lambda: self.generate(chains),
        }
        await agent()
        orders = list(itertools.permutations(ways))
        for number in range(rounds + 1):
            for way in orders[number % len(orders)]:
                await self.llm.reset_prefix_cache()
                await asyncio.to_thread(self.offline.reset_prefix_cache)
                await asyncio.sleep(_REST_SECONDS)
                clock, processor = time.perf_counter(), time.process_time()
                sampled = await ways[way]()
                if number:  # the first round is to warm up
                    taken[way].append((time.perf_counter() - clock, time.process_time() - processor))
                if sampled != episodes * turns * tokens:
                    raise RuntimeError(f"{way} sampled {sampled} tokens instead of {episodes * turns * tokens}")
        return taken


async def start(name: str, folder: Path) -> Bench:
    """Both vLLMs with a model."""
    path = resolve_model(name)
    tasks = "agentrl.envs.math:arithmetic_tasks"
    config = load_config(
        {
            "model": {"path": name},
            "data": {"train": tasks, "val": tasks, "max_prompt_length": 768, "max_response_length": 256},
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "rollout": {"engine": "vllm", "max_batch_size": 16, "max_model_len": 1024, "kv_cache_tokens": 24576},
            "val": {"temperature": 1.0},
            "trainer": {"total_steps": 1, "device": "cpu"},
        }
    )
    from agentrl.engine.vllm_local import start_vllm_engine

    chat_format = await asyncio.to_thread(ChatFormat.load, config.model, path)
    engine = await start_vllm_engine(config, path, 0, folder)
    from vllm import LLM

    llm = engine._client._llm
    settings = llm.vllm_config
    offline = await asyncio.to_thread(
        LLM,
        path,
        dtype=config.model.dtype,
        max_model_len=settings.model_config.max_model_len,
        max_num_seqs=settings.scheduler_config.max_num_seqs,
        max_num_batched_tokens=settings.scheduler_config.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.cache_config.kv_cache_memory_bytes,
        enable_chunked_prefill=False,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    return Bench(config, chat_format, engine, llm, offline)


async def compare(name: str, rounds: int) -> None:
    """Prints what the workloads of a model took."""
    with tempfile.TemporaryDirectory() as folder:
        bench = await start(name, Path(folder))
        costs = []
        for episodes, turns, tokens in SIZES[name]:
            taken = await bench.measure(episodes, turns, tokens, rounds)
            count = episodes * turns * tokens
            rates = {way: [count / clock for clock, _ in times] for way, times in taken.items()}
            more = [own - bare for (_, own), (_, bare) in zip(taken["agent"], taken["async"], strict=True)]
            costs.append((episodes * turns, count, statistics.median(more)))
            row = {"model": name, "episodes": episodes, "turns": turns, "tokens_per_turn": tokens, "rounds": rounds}
            row["tokens_per_second"] = {way: spread(values) for way, values in rates.items()}
            for other in ("async", "offline"):
                shares = [own / bare for own, bare in zip(rates["agent"], rates[other], strict=True)]
                row[f"share_of_{other}"] = spread(shares)
            row["processor_microseconds_per_turn"] = spread([1e6 * value / (episodes * turns) for value in more])
            report(row)
        if len(costs) > 1:
            (turns, tokens, seconds), (_, more_tokens, more_seconds), *_ = costs
            per_token = (more_seconds - seconds) / (more_tokens - tokens)
            per_turn = (seconds - per_token * tokens) / turns
            equation = {"microseconds_per_turn": 1e6 * per_turn, "microseconds_per_token": 1e6 * per_token}
            report({"model": name, **{key: round(value, 2) for key, value in equation.items()}})
        await bench.engine.close()
        bench.offline.llm_engine.engine_core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    environment = {**compute_environment(1), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    for name in arguments.models:
        asyncio.run(compare(name, arguments.rounds))


if __name__ == "__main__":
    main()
