"""Supervised training of the tiny model: a plain loop over freshly written dialogues."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from renderers import Qwen3Renderer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.tiny.dialogues import ToolUse, TrainingDialogue, encode_dialogue, write_dialogues
from agentrl.tiny.tokenizer import CONTEXT_LENGTH, END_OF_TURN, PADDING

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Supervision:
    """How the tiny model is taught.

    Attributes:
        steps: optimiser steps.
        batch_size: dialogues a step.
        learning_rate: peak of the schedule: linear warm-up, constant, linear decay.
        warmup_steps: steps until the learning rate has reached its peak.
        decay_from: share of the steps after which the learning rate begins to fall.
        final_learning_rate: the learning rate of the last step, as a share of the peak.
        copying_share: share of the steps that teach copying, which is the hard part: nearly every dialogue of
            that phase has the call, its expression and its result in it.
        copying_tool_use: how often the calculator is used in that phase.
        tool_use: how often it is used afterwards; the policy takes these probabilities over. Rare use leaves
            reinforcement learning something to find, and a majority for one operator makes the greedy policy
            solve about as much as the sampled one.
    """

    steps: int = 1500
    batch_size: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    decay_from: float = 0.6
    final_learning_rate: float = 0.03
    copying_share: float = 0.7
    copying_tool_use: float = 0.9
    tool_use: ToolUse = field(default_factory=lambda: {"+": 0.22, "-": 0.22, "*": 0.62})

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 0."""
        rise = (step + 1) / self.warmup_steps
        progress = step / self.steps
        fall = 1 - (1 - self.final_learning_rate) * (progress - self.decay_from) / (1 - self.decay_from)
        return self.learning_rate * min(1.0, rise, fall)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of under a million parameters for the tokenizer's vocabulary."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END_OF_TURN],
        pad_token_id=tokenizer.get_vocab()[PADDING],
    )
    return Qwen3ForCausalLM(config)


def supervise(model: Qwen3ForCausalLM, renderer: Qwen3Renderer, plan: Supervision, seed: int) -> None:
    """Trains `model` in place on dialogues that `seed` determines."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(_batches(renderer, plan, seed)):
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate_at(step)
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == plan.steps - 1:
            logger.info("step %d: loss %.4f, %.0f s", step, loss.item(), time.monotonic() - started)
    model.eval()


def _batches(renderer: Qwen3Renderer, plan: Supervision, seed: int) -> Iterator[list[TrainingDialogue]]:
    copying_steps = round(plan.copying_share * plan.steps)
    copying_tool_use = dict.fromkeys(plan.tool_use, plan.copying_tool_use)
    phases = ((copying_steps, copying_tool_use), (plan.steps - copying_steps, plan.tool_use))
    for phase, (steps, tool_use) in enumerate(phases):
        dialogues = write_dialogues(steps * plan.batch_size, 2 * seed + phase, tool_use)
        for _ in range(steps):
            yield [encode_dialogue(renderer, next(dialogues)) for _ in range(plan.batch_size)]


def _loss(model: Qwen3ForCausalLM, batch: Sequence[TrainingDialogue]) -> torch.Tensor:
    """Mean cross-entropy over the sampled tokens of a batch.

    Dialogues are padded on the right, where causal attention never looks, so no attention mask is needed.
    Logits are computed only at the positions that predict a sampled token.
    """
    length = max(len(dialogue.token_ids) for dialogue in batch)
    token_ids = torch.zeros(len(batch), length, dtype=torch.long)
    sampled = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, dialogue in enumerate(batch):
        token_ids[row, : len(dialogue.token_ids)] = torch.tensor(dialogue.token_ids)
        sampled[row, : len(dialogue.sampled)] = torch.tensor(dialogue.sampled)
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state  # [batch, length, hidden]
    logits = model.lm_head(hidden[:, :-1][sampled[:, 1:]])  # [sampled tokens, vocabulary]
    return cross_entropy(logits, token_ids[:, 1:][sampled[:, 1:]])
