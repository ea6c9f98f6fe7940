"""The policy under training: log-probs, one training step, weights to publish."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from agentrl.algorithm import (
    AdvantageConfig,
    Correction,
    LossConfig,
    Metrics,
    Totals,
    compute_advantages,
    mean_pair,
    merge,
    policy_loss,
    rollout_correction,
    summarise,
)
from agentrl.config import RunConfig
from agentrl.device import get_device
from agentrl.record import Batch, Branch
from agentrl.trainer.optimiser import Optimiser
from agentrl.trainer.packed_attention import PACKED_ATTENTION
from agentrl.trainer.packing import TrainingData, pack
from agentrl.trainer.token_logprobs import TokenLogProbs


class Actor:
    """Computes on one rank; nothing in it waits for anything.

    Args:
        model: a causal LM on its device; its attention implementation is replaced.
        total_optimiser_steps: horizon of the learning-rate decay; None if unknown.

    Attributes:
        forwards: how many forwards over a whole batch were made, by purpose: `proximal` and `train`.
    """

    def __init__(self, config: RunConfig, model: Any, *, total_optimiser_steps: int | None) -> None:
        model.set_attn_implementation(PACKED_ATTENTION)
        # Rollout and training must be the same function of the weights: no dropout.
        model.eval()
        self.model = model
        self._token_log_probs = TokenLogProbs(model)
        self.forwards: Counter[str] = Counter()
        self._config = config
        self._max_tokens = config.actor.ppo_max_token_len_per_gpu
        self._optimiser = Optimiser(
            model, config.actor.optim, grad_clip=config.actor.grad_clip, total_steps=total_optimiser_steps
        )
        actor = config.actor
        correction = config.algorithm.rollout_correction
        self._reinforce = actor.proximal == "bypass" and correction.loss_type == "reinforce"
        self._loss_mode = "bypass_mode" if self._reinforce else actor.loss_mode
        self._autocast = config.model.dtype == "bfloat16"
        self._loss_config = LossConfig(
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=_loss_scale(config),
            loss_type=correction.loss_type,
        )

    def update(self, batch: Batch) -> dict[str, float]:
        """One training step: advantages over the whole batch, then one optimiser step per mini-batch.

        Returns:
            the trainer's part of the metrics row.
        """
        data = TrainingData.from_groups(batch.groups, self._config.actor.ppo_mini_batch_size)
        # Group statistics are those of all tokens; what is too old to be trained is masked after them.
        data = data.with_columns(advantages=self._advantages(data)).trained_from(batch.min_version)
        data = data.to(self.model.device)
        if self._config.actor.proximal == "recompute":
            data = data.with_columns(prox_logp=self._proximal(data))
        self.forwards["train"] += 1
        lr = self._optimiser.lr
        parts: list[Metrics] = []
        norms: list[float | None] = []
        for mini_batch in data.mini_batches():
            step_parts = merge(self._gradients(mini_batch))
            # A NaN log-prob can leave the gradient finite: the clamps of the loss stop it. The loss shows it.
            norms.append(self._optimiser.step(valid=bool(step_parts["actor/loss"][0].isfinite())))
            parts.append(step_parts)
        taken = [norm for norm in norms if norm is not None]
        merged = merge(parts)
        # What could not be measured (every token was rejected) is not a number, rather than no key.
        return (
            dict.fromkeys(merged, math.nan)
            | summarise(merged)
            | {
                "actor/grad_norm": sum(taken) / len(taken) if taken else 0.0,
                "actor/skipped_steps": float(len(norms) - len(taken)),
                "actor/lr": lr,
                "tokens/packed": float(sum(len(sequence.branch.token_ids) for sequence in data.trained_sequences)),
            }
        )

    def log_probs(self, branches: Sequence[Branch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the branches' trained tokens and entropies (without gradient) of the distributions they come
        from, both `[1, N]` in float32 nats, under the temperature each token was sampled at."""
        packed = pack(branches, self.model.device)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._autocast):
            logp, entropy = self._token_log_probs(packed)
        return logp[None], entropy[None]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights to publish in the engines' type, tied ones once. Every rank advances it: gathering shards is a
        collective."""
        dtype = getattr(torch, self._config.model.dtype)
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(dtype)

    def _advantages(self, data: TrainingData) -> torch.Tensor:
        algorithm = self._config.algorithm
        advantages, _ = compute_advantages(
            algorithm.adv_estimator,
            token_rewards=data["token_rewards"],
            mask=data.mask,
            layout=data.layout,
            config=AdvantageConfig(norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo),
        )
        return advantages

    @torch.no_grad()
    def _proximal(self, data: TrainingData) -> torch.Tensor:
        """Log-probs under the weights at the start of the step, `[1, N]`; 0 for sequences that are not trained."""
        self.forwards["proximal"] += 1
        proximal = torch.zeros_like(data["behav_logp"])
        for piece in data.micro_batches(self._max_tokens):
            proximal[:, data.tokens_of(piece)] = self.log_probs([data.sequences[i].branch for i in piece])[0]
        return proximal

    def _gradients(self, mini_batch: TrainingData) -> list[Metrics]:
        """Accumulates the gradients of one optimiser step; all denominators are those of the whole step."""
        totals = Totals.count(mini_batch.mask, mini_batch.layout)
        zero = torch.zeros((), device=self.model.device)
        parts: list[Metrics] = [{"actor/loss": (zero, zero + 1)}]
        if "prox_logp" in mini_batch.columns:
            correction = self._correct(mini_batch, mini_batch["prox_logp"])
            parts.append(correction.metrics)
            mini_batch = mini_batch.with_columns(weights=correction.weights, kept=correction.mask)
        for indices in mini_batch.micro_batches(self._max_tokens):
            micro = mini_batch.select(indices)
            logp, entropy = self.log_probs([sequence.branch for sequence in micro.sequences])
            if "prox_logp" in micro.columns:
                correction = Correction(micro.columns.get("weights"), micro["kept"], {})
            else:
                # Under bypass the ratio of the loss stands for the weight, except with REINFORCE.
                correction = self._correct(micro, logp.detach())
                parts.append(correction.metrics)
                correction = correction if self._reinforce else replace(correction, weights=None)
            loss, metrics = policy_loss(
                self._loss_mode,
                logp=logp,
                prox_logp=micro.columns.get("prox_logp", micro["behav_logp"]),
                behav_logp=micro["behav_logp"],
                advantages=micro["advantages"],
                mask=micro.mask,
                config=self._loss_config,
                layout=micro.layout,
                correction=correction,
                totals=totals,
            )
            loss.backward()
            own = {"actor/loss": (loss.detach(), zero), "actor/entropy": mean_pair(entropy, micro.mask != 0)}
            parts += [metrics, own]
        return parts

    def _correct(self, data: TrainingData, prox_logp: torch.Tensor) -> Correction:
        return rollout_correction(
            prox_logp=prox_logp,
            behav_logp=data["behav_logp"],
            mask=data.mask,
            config=self._config.algorithm.rollout_correction,
            layout=data.layout,
        )


def _loss_scale(config: RunConfig) -> float | None:
    """The divisor of `seq-mean-token-sum-norm`: the width of a micro-batch's row would make the loss depend on it."""
    if config.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        return None
    return config.actor.loss_scale_factor or float(config.data.max_response_length)


def load_actor(config: RunConfig, path: str) -> Actor:
    """An actor for the model in `path` (directory or hub id), on the run's device.

    Raises:
        OSError: no model there.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.data.seed)
    device = get_device(config.trainer.device).torch_device()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    steps = config.trainer.total_steps
    horizon = steps * config.async_training.require_batches if steps else None
    return Actor(config, model.to(device), total_optimiser_steps=horizon)
