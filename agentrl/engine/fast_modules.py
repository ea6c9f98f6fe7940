"""Faster forms of a model's modules, for float32 on a CPU: the same results up to rounding.

A small model's step is mostly the time between operations, a larger one's the products with its weights. So the layers
of the Llama kind (Llama, Qwen, Mistral, SmolLM and others) are computed in a third of the operations, and weights are
packed for products with some tens of rows. Whether a layer is of that kind is found out by trying: what counts is what
it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from agentrl.engine.attention import Prompt, StepLayout, attend
from agentrl.engine.kv_cache import KVCache

_PACKED_FROM = 1 << 17
_ROWS = 32


class FastModules:
    """Takes over the forward of modules where that is quicker; their parameters stay where and what they are.

    Models of other types and on other devices stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._products: list[_Product] = []
        parameter = next(model.parameters())
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return
        replaced: set[nn.Module] = set()
        for module in model.modules():
            if module not in replaced and (forward := self._faster(module)) is not None:
                module.forward = forward
                replaced.update(module.modules())

    def _faster(self, module: Any) -> Callable[..., torch.Tensor] | None:
        if hasattr(module, "self_attn"):
            layer = _fast_layer(module)
            self._products += layer.products if layer is not None else []
            return None if layer is None else layer.forward
        if type(module) is nn.Linear and module.weight.numel() >= _PACKED_FROM:
            self._products.append(_Product([module]))
            return self._products[-1].forward
        if type(module).__name__.endswith("RMSNorm"):
            return _fast_norm(module)
        return None

    def refresh(self) -> None:
        """Takes over the weights as they are now."""
        for product in self._products:
            product.refresh()


class _Product:
    """Linear layers of the same input as one product, with a copy of their weights.

    Large ones are packed in oneDNN's blocked order, which is 1.4 to 2 times as quick for a batch of some tens of rows.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._modules = modules
        size = sum(module.weight.numel() for module in modules)
        self._packed = size >= _PACKED_FROM and torch.backends.mkldnn.is_available()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        weights: list[torch.Tensor] = [module.weight for module in self._modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases: list[torch.Tensor] = [module.bias for module in self._modules if module.bias is not None]
        if biases and len(biases) < len(weights):
            raise ValueError("either all of a product's layers have a bias, or none")
        self._bias = torch.cat(biases) if biases else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self._packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return linear(x, self._weight, self._bias)


class _FastLayer:
    """A decoder layer: attention with rotary positions and a gated MLP, each after an RMS norm.

    Queries, keys and values are one product, and so are gate and up; queries and keys are normed and rotated together.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self._head_dim = int(attention.head_dim)
        self._norms = [_norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)]
        self._head_norms = (
            [_norm_of(attention.q_norm), _norm_of(attention.k_norm)] if hasattr(attention, "q_norm") else []
        )
        self._heads = [
            module.out_features // self._head_dim for module in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        self._qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = _Product([attention.o_proj])
        self._gate_up = _Product([mlp.gate_proj, mlp.up_proj])
        self._down = _Product([mlp.down_proj])
        self._activation = mlp.act_fn
        self.products = [self._qkv, self._out, self._gate_up, self._down]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_layout: StepLayout,
        **_: Any,
    ) -> torch.Tensor:
        """`hidden_states` and the result are `[1, T, hidden]`, cosines and sines `[1, T, head_dim]`."""
        hidden = hidden_states[0]
        queries, keys, values = self._rotated(self._qkv.forward(self._norms[0](hidden)), *position_embeddings)
        attended = attend(step_layout, self._index, queries, keys, values, self._scaling)
        hidden = hidden + self._out.forward(attended.flatten(1))
        gate, up = self._gate_up.forward(self._norms[1](hidden)).chunk(2, dim=-1)
        return (hidden + self._down.forward(self._activation(gate) * up))[None]

    def _rotated(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        both, values = heads.split([self._heads[0] + self._heads[1], self._heads[2]], dim=1)
        if self._head_norms:
            parts = both.split(self._heads[:2], dim=1)
            both = torch.cat([norm(part) for norm, part in zip(self._head_norms, parts, strict=True)], dim=1)
        first, second = both.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated = torch.addcmul(both * cos[0, :, None], turned, sin[0, :, None])
        queries, keys = rotated.split(self._heads[:2], dim=1)
        return queries, keys, values


def _norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, eps = module.weight, float(module.variance_epsilon)
    return lambda x: rms_norm(x, weight.shape, weight, eps)


@torch.no_grad()
def _fast_norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The norm in one operation, if that gives the same: some families add 1 to the weight."""
    if not hasattr(module, "variance_epsilon"):
        return None
    norm = _norm_of(module)
    x = torch.linspace(-2, 3, module.weight.numel())[None]
    return norm if torch.allclose(module(x), norm(x), rtol=1e-5, atol=1e-6) else None


@torch.no_grad()
def _fast_layer(module: Any) -> _FastLayer | None:
    """The layer in fewer operations, if it has the parts of one and gives the same for a prompt of five tokens."""
    count = 5
    try:
        layer = _FastLayer(module)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, count, module.self_attn.q_proj.in_features, generator=generator)
        angles = torch.randn(1, count, layer._head_dim // 2, generator=generator).repeat(1, 1, 2)
        positions = torch.arange(count)
        results = [
            forward(
                hidden,
                position_embeddings=(angles.cos(), angles.sin()),
                attention_mask=None,
                step_layout=StepLayout(
                    cache=KVCache(1, count, count),
                    rows=torch.zeros(count, dtype=torch.long),
                    positions=positions,
                    decoding=0,
                    bias=torch.zeros(0, 1, 1, 0),
                    prompts=[Prompt(0, count, 0, count, None)],
                ),
            )
            for forward in (module.forward, layer.forward)
        ]
        same = torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-4 * float(results[0].abs().max()))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return layer if same else None
