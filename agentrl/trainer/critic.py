"""The value model of GAE: what the state before each trained token is worth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.algorithm import Metrics, Totals, merge, value_loss
from agentrl.config import RunConfig
from agentrl.trainer.optimiser import Optimiser
from agentrl.trainer.packed_attention import PACKED_ATTENTION, PackedRows
from agentrl.trainer.packing import TrainingData, pack


class ValueModel(nn.Module):
    """A transformer without its output layer, and a head of one number.

    The head starts at 0, so that an untrained critic says nothing.

    Args:
        backbone: a Hugging Face base model (`AutoModel`).
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        backbone.set_attn_implementation(PACKED_ATTENTION)
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.eval()

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: Tensor, places: Tensor) -> Tensor:
        """Values `[N]` in float32 at `places` of a packed row `[1, T]`."""
        hidden = self.backbone(
            input_ids=token_ids, position_ids=positions, use_cache=False, packed_rows=PackedRows(lengths)
        ).last_hidden_state[0]
        # A value has to be told from the next one: eight bits are too few.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden[places].float())[:, 0]


class Critic:
    """Values for a batch, and the update of the model they come from.

    Args:
        model: on its device.
        total_optimiser_steps: horizon of the learning-rate decay; None if unknown.

    Attributes:
        forwards: like those of an `Actor`: `values` and `critic` (its update).
    """

    def __init__(self, config: RunConfig, model: ValueModel, *, total_optimiser_steps: int | None) -> None:
        self.model = model
        self.forwards: Counter[str] = Counter()
        self._config = config.critic
        self._max_tokens = config.actor.ppo_max_token_len_per_gpu
        self._scale = token_scale(config.critic.loss_agg_mode, config)
        self._autocast = config.model.dtype == "bfloat16"
        self._optimiser = Optimiser(
            model, config.critic.optim, grad_clip=config.critic.grad_clip, total_steps=total_optimiser_steps
        )

    @torch.no_grad()
    def with_values(self, data: TrainingData) -> TrainingData:
        """The same data with the column `values`."""
        self.forwards["values"] += 1
        return data.computed(self._max_tokens, lambda micro: {"values": self._values(micro)})

    def update(self, mini_batch: TrainingData) -> Metrics:
        """One optimiser step on the columns `values` and `returns`; all denominators are those of the whole step."""
        totals = Totals.count(mini_batch.mask, mini_batch.layout)
        zero = torch.zeros((), device=self.model.head.weight.device)
        parts: list[Metrics] = [{"critic/loss": (zero, zero + 1)}]
        for indices in mini_batch.micro_batches(self._max_tokens):
            micro = mini_batch.select(indices)
            loss, metrics = value_loss(
                values=self._values(micro),
                old_values=micro["values"],
                returns=micro["returns"],
                mask=micro.mask,
                cliprange_value=self._config.cliprange_value,
                loss_agg_mode=self._config.loss_agg_mode,
                layout=micro.layout,
                totals=totals,
                scale=self._scale,
            )
            loss.backward()
            parts += [metrics, {"critic/loss": (loss.detach(), zero)}]
        merged = merge(parts)
        norm = self._optimiser.step(valid=bool(merged["critic/loss"][0].isfinite()))
        return merged | {
            "critic/grad_norm": (zero + norm, zero + 1) if norm > 0 else (zero, zero + 1),
            "critic/skipped_fraction": (zero + (not norm > 0), zero + 1),
        }

    def _values(self, data: TrainingData) -> Tensor:
        device = self.model.head.weight.device
        packed = pack([sequence.branch for sequence in data.sequences], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
            values = self.model(packed.token_ids, packed.positions, packed.lengths, packed.predicting)
        return values[None]


def token_scale(loss_agg_mode: str, config: RunConfig, given: float | None = None) -> float | None:
    """The divisor of `seq-mean-token-sum-norm`: the width of a micro-batch's row would make the loss depend on it."""
    if loss_agg_mode != "seq-mean-token-sum-norm":
        return None
    return given or float(config.data.max_response_length)


def load_critic(config: RunConfig, path: str, *, total_optimiser_steps: int | None, device: torch.device) -> Critic:
    """A critic that starts from the model in `path`.

    Raises:
        OSError: no model there.
    """
    from transformers import AutoModel

    backbone: Any = AutoModel.from_pretrained(path, dtype=torch.float32)
    return Critic(config, ValueModel(backbone).to(device), total_optimiser_steps=total_optimiser_steps)
