"""The training step: credit for a batch, then one optimiser step for each mini-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from agentrl.algorithm import (
    Correction,
    LossConfig,
    Metrics,
    Totals,
    aggregate,
    engine_mismatch,
    kl_penalty,
    mean_pair,
    merge,
    policy_loss,
    proximal_logp,
    rollout_correction,
    summarise,
)
from agentrl.config import RunConfig
from agentrl.config.names import LOSS_CONSTANTS, NEEDS_PROXIMAL
from agentrl.device import get_device
from agentrl.lora import add_lora
from agentrl.record import Batch, Branch
from agentrl.trainer.anchor import Anchor
from agentrl.trainer.credit import CreditAssigner
from agentrl.trainer.critic import Critic, load_critic, token_scale
from agentrl.trainer.lora import has_lora
from agentrl.trainer.optimiser import Optimiser
from agentrl.trainer.packing import TrainingData
from agentrl.trainer.policy_model import PolicyModel
from agentrl.trainer.published import published_tensors
from agentrl.trainer.token_logprobs import TokenStatistics


class Actor:
    """Computes on one rank; nothing in it waits for anything.

    Args:
        model: a causal LM on its device; its attention implementation is replaced.
        total_optimiser_steps: horizon of the learning-rate decay, which does not move while only the critic learns;
            None if unknown.
        reference: the untrained model, where a KL term asks it and `model` has no LoRA adapters.
        critic: where the advantage estimator needs one.

    Raises:
        ValueError: the config needs a reference model or a critic, and there is none.

    Attributes:
        forwards: how many forwards over a whole batch were made, by purpose: `proximal`, `reference` and `train`.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Any,
        *,
        total_optimiser_steps: int | None,
        reference: Any = None,
        critic: Critic | None = None,
    ) -> None:
        if config.has_reference and reference is None and not has_lora(model):
            raise ValueError("the config asks for a reference policy: pass the untrained model as `reference`")
        if config.has_critic and critic is None:
            raise ValueError("algorithm.adv_estimator is gae: pass a critic")
        self.model = model
        self.forwards: Counter[str] = Counter()
        self._config = config
        self._policy = PolicyModel(model, config.model.dtype, reference)
        self._critic = critic
        self._credit = CreditAssigner(config)
        actor, correction = config.actor, config.algorithm.rollout_correction
        self._optimiser = Optimiser(model, actor.optim, grad_clip=actor.grad_clip, total_steps=total_optimiser_steps)
        anchored = actor.proximal == "recompute" and actor.prox_anchor == "publish"
        self._anchor = Anchor(model) if anchored else None
        self._max_tokens = actor.ppo_max_token_len_per_gpu
        self._reinforce = actor.proximal == "bypass" and correction.loss_type == "reinforce"
        self._loss_mode = "bypass_mode" if self._reinforce else actor.loss_mode
        self._loss_config = _loss_config(config)
        self._version = -1
        self._steps_since_publish = 0
        self._training_steps = 0

    def update(self, batch: Batch) -> dict[str, float]:
        """One training step: advantages over the whole batch, then one optimiser step per mini-batch.

        Returns:
            the trainer's part of the metrics row.
        """
        self._note_version(batch.version)
        data = TrainingData.from_groups(batch.groups, self._config.actor.ppo_mini_batch_size).to(self.model.device)
        data = self._with_forwards(data)
        credit = self._credit.assign(data)
        data = data.with_columns(
            advantages=credit.advantages.to(self.model.device), returns=credit.returns.to(self.model.device)
        )
        # Group statistics are those of all tokens; what is too old to be trained is masked after them.
        data = data.trained_from(batch.min_version).with_branch_weights(self._config.algorithm.branch_weighting)
        self.forwards["train"] += 1
        lr = self._optimiser.lr
        started = self._policy_version
        learns = self._training_steps >= self._config.trainer.critic_warmup
        parts: list[Metrics] = []
        norms: list[float] = []
        if self._critic is not None:
            self._critic.forwards["critic"] += 1
        for mini_batch in data.mini_batches():
            if self._critic is not None:
                parts.append(self._critic.update(mini_batch))
            step_parts = merge(self._gradients(mini_batch, started, learns=learns))
            if learns:
                # A NaN log-prob can leave the gradient finite: the clamps of the loss stop it. The loss shows it.
                norms.append(self._optimiser.step(valid=bool(step_parts["actor/loss"][0].isfinite())))
                self._steps_since_publish += 1
            parts.append(step_parts)
        self._training_steps += 1
        taken = [norm for norm in norms if norm > 0]
        merged = merge(parts)
        # What could not be measured (every token was rejected) is not a number, rather than no key. That all tokens are
        # older than the policy is no such thing.
        measured = [name for name in merged if not name.startswith("mismatch/engine_")]
        return (
            dict.fromkeys(measured, math.nan)
            | summarise(merged)
            | credit.metrics
            | {
                "actor/grad_norm": sum(taken) / len(taken) if taken else 0.0,
                "actor/skipped_steps": float(len(norms) - len(taken)),
                "actor/nonfinite_steps": float(sum(map(math.isnan, norms))),
                "actor/lr": lr,
                "tokens/packed": float(sum(len(sequence.branch.token_ids) for sequence in data.trained_sequences)),
            }
        )

    def log_probs(self, branches: Sequence[Branch]) -> TokenStatistics:
        """What the policy says of the branches' trained tokens."""
        return self._policy.statistics(branches)

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights to publish, as the run's engines take them. Every rank advances it: gathering shards is a
        collective."""
        config = self._config
        return published_tensors(
            self.model,
            getattr(torch, config.model.dtype),
            adapters=config.publishes_adapters,
            # agentrl's own engine is transformers' model too: its parameters are this model's.
            checkpoint_names=config.rollout.engine != "torch",
        )

    def _note_version(self, version: int) -> None:
        """The weights are those published as `version` when its first batch comes."""
        if version != self._version:
            self._version, self._steps_since_publish = version, 0
            if self._anchor is not None:
                self._anchor.take()

    @property
    def _policy_version(self) -> float:
        """v + k/K after k of the K optimiser steps that lead from version v to the next one."""
        async_training = self._config.async_training
        steps = async_training.require_batches * async_training.trigger_parameter_sync_step
        return self._version + min(1.0, self._steps_since_publish / steps)

    @torch.no_grad()
    def _with_forwards(self, data: TrainingData) -> TrainingData:
        """Columns that take a forward over the whole batch each, before anything is updated."""
        config = self._config
        if config.actor.proximal == "recompute":
            self.forwards["proximal"] += 1
            with nullcontext() if self._anchor is None else self._anchor.in_place():
                data = data.computed(self._max_tokens, self._proximal)
            data = data.with_columns(anchor_logp=data["prox_logp"])
            if config.algorithm.adv_estimator in NEEDS_PROXIMAL:
                data = data.with_columns(importance_weights=self._correct(data, data["prox_logp"]).weights)
        else:
            data = data.with_columns(anchor_logp=data["behav_logp"])
        if config.has_reference:
            self.forwards["reference"] += 1
            data = data.computed(
                self._max_tokens, lambda micro: {"ref_logp": self._policy.reference_logp(micro.branches)}
            )
        return data if self._critic is None else self._critic.with_values(data)

    def _proximal(self, micro: TrainingData) -> dict[str, torch.Tensor]:
        statistics = self._policy.statistics(micro.branches)
        columns = {"prox_logp": statistics.logp}
        if self._config.algorithm.adv_estimator in NEEDS_PROXIMAL:
            columns["sum_pi_squared"] = statistics.sum_pi_squared
        return columns

    def _gradients(self, mini_batch: TrainingData, step_version: float, *, learns: bool) -> list[Metrics]:
        """Accumulates the gradients of one optimiser step; all denominators are those of the whole step.

        Args:
            step_version: of the weights at the start of the training step.
            learns: false computes the metrics alone.
        """
        totals = Totals.count(mini_batch.mask, mini_batch.layout)
        zero = torch.zeros((), device=self.model.device)
        parts: list[Metrics] = [{"actor/loss": (zero, zero + 1)}]
        if self._config.actor.use_kl_loss:
            parts.append({"actor/kl_loss": (zero, zero + 1)})
        if "prox_logp" in mini_batch.columns:
            correction = self._correct(mini_batch, mini_batch["prox_logp"])
            parts.append(correction.metrics)
            mini_batch = mini_batch.with_columns(weights=correction.weights, kept=correction.mask)
        for indices in mini_batch.micro_batches(self._max_tokens):
            micro = mini_batch.select(indices)
            with torch.set_grad_enabled(learns):
                current = self._policy.statistics(micro.branches, entropy_gradient=self._config.actor.entropy_coeff > 0)
            prox_logp, correction = self._anchored(micro, current.logp.detach(), step_version)
            parts.append(correction.metrics)
            loss, metrics = policy_loss(
                self._loss_mode,
                logp=current.logp,
                prox_logp=prox_logp,
                behav_logp=micro["behav_logp"],
                advantages=micro["advantages"],
                mask=micro.mask,
                config=self._loss_config,
                layout=micro.layout,
                correction=correction,
                totals=totals,
            )
            loss, own = self._regularised(loss, current, micro, correction.mask, totals)
            if learns:
                loss.backward()
            own["actor/loss"] = (loss.detach(), zero)
            own["actor/entropy"] = mean_pair(current.entropy, micro.mask != 0)
            if not self._steps_since_publish:  # the weights are still the published ones, of which engines sampled
                fresh = micro.mask * (micro["versions"] == self._version)
                own |= engine_mismatch(logp=current.logp, behav_logp=micro["behav_logp"], mask=fresh)
            parts += [metrics, own]
        return parts

    def _anchored(
        self, micro: TrainingData, logp: torch.Tensor, step_version: float
    ) -> tuple[torch.Tensor, Correction]:
        """The log-probs that the ratio is taken to, and the correction, for a micro-batch."""
        if "prox_logp" in micro.columns:
            return micro["prox_logp"], Correction(micro.columns.get("weights"), micro["kept"], {})
        if self._config.actor.proximal == "loglinear":
            published = self._config.actor.prox_anchor == "publish"
            prox_logp = proximal_logp(
                "loglinear",
                logp=logp,
                behav_logp=micro["behav_logp"],
                versions=micro["versions"],
                version_prox=self._version if published else step_version,
                version_now=self._policy_version,
            )
            return prox_logp, self._correct(micro, prox_logp)
        # Under bypass the ratio of the loss stands for the weight, except with REINFORCE.
        correction = self._correct(micro, logp)
        return micro["behav_logp"], correction if self._reinforce else replace(correction, weights=None)

    def _regularised(
        self, loss: torch.Tensor, current: TokenStatistics, micro: TrainingData, kept: torch.Tensor, totals: Totals
    ) -> tuple[torch.Tensor, Metrics]:
        """The loss with its entropy bonus and its KL term, of the tokens that rejection left."""
        actor, metrics = self._config.actor, dict[str, Any]()

        def share(values: torch.Tensor) -> torch.Tensor:
            scale = self._loss_config.loss_scale_factor
            values = torch.where(kept != 0, values, 0.0)
            return aggregate(values, micro.mask, actor.loss_agg_mode, layout=micro.layout, totals=totals, scale=scale)

        if actor.entropy_coeff > 0:
            loss = loss - actor.entropy_coeff * share(current.entropy)
        if actor.use_kl_loss:
            divergence = share(kl_penalty(current.logp, micro["ref_logp"], actor.kl_loss_type))
            loss = loss + actor.kl_loss_coef * divergence
            metrics["actor/kl_loss"] = (divergence.detach(), torch.zeros_like(divergence))
        return loss, metrics

    def _correct(self, data: TrainingData, prox_logp: torch.Tensor) -> Correction:
        return rollout_correction(
            prox_logp=prox_logp,
            behav_logp=data["behav_logp"],
            mask=data.mask,
            config=self._config.algorithm.rollout_correction,
            layout=data.layout,
        )


def _loss_config(config: RunConfig) -> LossConfig:
    actor = config.actor
    same = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", *LOSS_CONSTANTS)
    return LossConfig(
        **{name: getattr(actor, name) for name in same},
        loss_scale_factor=token_scale(actor.loss_agg_mode, config, actor.loss_scale_factor),
        loss_type=config.algorithm.rollout_correction.loss_type,
    )


def load_actor(config: RunConfig, path: str, critic_path: str | None = None) -> Actor:
    """An actor for the model in `path` (directory or hub id), on the run's device, with what it needs beside it.

    Args:
        critic_path: where the critic starts from, if there is one; None: from `path`.

    Raises:
        OSError: no model there.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.data.seed)
    device = get_device(config.trainer.device).torch_device()
    steps = config.trainer.total_steps
    per_step = config.async_training.require_batches
    horizon = steps * per_step if steps else None
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reference: Any = None
    if config.model.lora_rank:
        add_lora(model, config.model)
    elif config.has_reference:
        # In the policy's own type: with other roundings the divergence of the policy from itself would not be 0.
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        reference = reference.to(device).requires_grad_(False)
    critic = None
    if config.has_critic:
        critic = load_critic(config, critic_path or path, total_optimiser_steps=horizon, device=device)
    own = None if horizon is None else horizon - config.trainer.critic_warmup * per_step
    return Actor(config, model.to(device), total_optimiser_steps=own, reference=reference, critic=critic)
