"""Small random models, made-up episodes, and the padded forward of transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config import RunConfig, load_config
from agentrl.lora import add_lora
from agentrl.record import Batch, Branch, Group, Trajectory, Turn
from agentrl.trainer.actor import Actor
from agentrl.trainer.critic import Critic, ValueModel
from agentrl.trainer.loop import TrainLoop
from agentrl.weights.shm import ShmSender
from tests.support.models import random_model
from tests.support.scripted_rollout import Rows, ScriptedRollout

torch.set_num_threads(1)

VOCABULARY = 61


@pytest.fixture(scope="session")
def new_model() -> Callable[..., Any]:
    """`new_model(family="qwen3", seed=0)`: a random model."""

    def build(family: str = "qwen3", seed: int = 0) -> Any:
        return random_model(family, seed, vocab_size=VOCABULARY, max_position_embeddings=512, initializer_range=0.15)

    return build


@pytest.fixture(scope="session")
def new_config() -> Callable[..., RunConfig]:
    """`new_config("actor.clip_ratio_low=0.1", ...)`: a run's configuration with these keys."""

    def build(*overrides: str) -> RunConfig:
        values = {"data": {"train": "tasks:load"}, "trainer": {"device": "cpu", "total_steps": 8}}
        return load_config(values, overrides)

    return build


@pytest.fixture(scope="session")
def new_actor(new_model: Callable[..., Any], new_config: Callable[..., RunConfig]) -> Callable[..., Actor]:
    """`new_actor("key=value", ..., family="qwen3", seed=0)`: an actor on a fresh random model."""

    def build(*overrides: str, family: str = "qwen3", seed: int = 0, steps: int | None = None) -> Actor:
        config, model = new_config(*overrides), new_model(family, seed)
        reference = None
        if config.model.lora_rank:
            add_lora(model, config.model)
        elif config.has_reference:
            reference = new_model(family, seed)
        critic = None
        if config.has_critic:
            critic = Critic(config, ValueModel(new_model(family, seed + 1).model), total_optimiser_steps=steps)
        return Actor(config, model, total_optimiser_steps=steps, reference=reference, critic=critic)

    return build


@pytest.fixture(scope="session")
def new_branch() -> Callable[..., Branch]:
    """`new_branch(rng, turns=2, temperature=1.0)`: a random conversation of `turns` sampled turns."""

    def build(rng: np.random.Generator, turns: int = 2, temperature: float = 1.0, longest: int = 12) -> Branch:
        ids, mask, places = [], [], []
        for _ in range(turns):
            context, sampled = rng.integers(1, longest, size=2)
            ids += rng.integers(VOCABULARY, size=context + sampled).tolist()
            places.append(Turn(len(mask) + int(context), len(ids), temperature, "stop"))
            mask += [0] * context + [1] * sampled
        trained = np.array(mask, np.uint8)
        logprobs = np.where(trained == 1, -rng.gamma(2.0, 1.0, size=len(mask)), 0.0).astype(np.float32)
        versions = np.where(trained == 1, 0, -1).astype(np.int32)
        return Branch(np.array(ids, np.int32), trained, logprobs, versions, places)

    return build


@pytest.fixture(scope="session")
def new_trajectory() -> Callable[..., Trajectory]:
    """`new_trajectory(branches, reward, name)`: an episode of these branches."""

    def build(branches: list[Branch], reward: float = 1.0, name: str = "e0") -> Trajectory:
        return Trajectory(name, "g0", "t0", 0, 0, branches, reward, timings={"episode": 1.0})

    return build


@pytest.fixture(scope="session")
def new_groups(new_branch: Callable[..., Branch], new_trajectory: Callable[..., Trajectory]) -> Callable[..., Any]:
    """`new_groups(count, members, seed)`: groups of random episodes, some of several branches."""

    def build(count: int = 2, members: int = 3, seed: int = 0, temperature: float = 1.0) -> list[Group]:
        rng = np.random.default_rng(seed)
        groups = []
        for number in range(count):
            episodes = []
            for member in range(members):
                turns = rng.integers(1, 4, size=rng.integers(1, 3))
                branches = [new_branch(rng, int(n), temperature) for n in turns]
                episodes.append(new_trajectory(branches, float(member == 0) + 0.25 * number, f"g{number}.{member}"))
            groups.append(Group(f"g{number}", episodes, 0))
        return groups

    return build


@pytest.fixture(scope="session")
def padded_logprobs() -> Callable[..., list[torch.Tensor]]:
    """`padded_logprobs(model, branches)`: log-probs of each branch's trained tokens by a plain padded forward."""

    def compute(model: Any, branches: Sequence[Branch]) -> list[torch.Tensor]:
        width = max(len(branch.token_ids) for branch in branches)
        ids = torch.zeros(len(branches), width, dtype=torch.long)
        attention = torch.zeros(len(branches), width, dtype=torch.long)
        for row, branch in enumerate(branches):
            ids[row, : len(branch.token_ids)] = torch.from_numpy(branch.token_ids.astype(np.int64))
            attention[row, : len(branch.token_ids)] = 1
        logits = model(input_ids=ids, attention_mask=attention).logits.float()
        result = []
        for row, branch in enumerate(branches):
            temperature = torch.from_numpy(branch.temperatures())[1:, None]
            logp = torch.log_softmax(logits[row, : len(branch.token_ids) - 1] / temperature, dim=-1)
            chosen = logp.gather(-1, ids[row, 1 : len(branch.token_ids), None])[:, 0]
            result.append(chosen[torch.from_numpy(branch.loss_mask[1:] == 1)])
        return result

    return compute


@pytest.fixture(scope="session")
def sampled_by(padded_logprobs: Callable[..., Any]) -> Callable[..., list[Group]]:
    """`sampled_by(model, groups, noise=0.0)`: the groups with the model's own log-probs as the recorded ones."""

    @torch.no_grad()
    def record(model: Any, groups: list[Group], noise: float = 0.0) -> list[Group]:
        rng = np.random.default_rng(1)
        branches = [b for group in groups for trajectory in group.trajectories for b in trajectory.branches]
        for branch, logp in zip(branches, padded_logprobs(model, branches), strict=True):
            branch.logprobs[branch.loss_mask == 1] = logp.numpy() + noise * rng.standard_normal(len(logp))
        return groups

    return record


@pytest.fixture
def new_loop(tmp_path: Path, new_model: Callable[..., Any], new_groups: Any, new_config: Any, new_actor: Any):
    """`new_loop("key=value", ..., batches=4)`: a loop, its scripted rollout side, and the rows it writes."""

    def build(
        *overrides: str, batches: int = 100, rollout: type[ScriptedRollout] = ScriptedRollout
    ) -> tuple[TrainLoop, ScriptedRollout, Rows]:
        keys = ("actor.ppo_mini_batch_size=2", "actor.optim.lr=0.01", *overrides)
        side, rows = rollout(new_groups(2, 3), new_model(seed=9), batches), Rows()
        loop = TrainLoop(
            new_config(*keys),
            actor=new_actor(*keys),
            rollout=side,
            sender=ShmSender(tmp_path, 1 << 14),
            sink=rows,
            run_dir=tmp_path,
        )
        return loop, side, rows

    return build


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    """`batch_of(groups)`: what the rollout side would hand over."""
    return lambda groups: Batch(0, 0, groups)


class RecordedOptimiser:
    """Keeps the gradients of each optimiser step instead of taking it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.lr = 0.0
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.valid: list[bool] = []

    def step(self, *, valid: bool = True) -> float:
        named = self._model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        self.valid.append(valid)
        self._model.zero_grad(set_to_none=True)
        return 1.0


@pytest.fixture(scope="session")
def gradients_of() -> Callable[..., tuple[list[dict[str, torch.Tensor]], dict[str, float]]]:
    """`gradients_of(actor, batch)`: the gradients by parameter of each optimiser step, and the row of metrics; the
    weights stay."""

    def compute(actor: Actor, batch: Batch) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
        optimiser: Any = RecordedOptimiser(actor.model)
        actor._optimiser = optimiser
        row = actor.update(batch)
        return optimiser.gradients, row

    return compute
