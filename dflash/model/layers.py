"""The drafter's layer: a pre-norm Qwen3 decoder layer whose keys and values also come from the target's features.

Legend for shapes: T block tokens, S context tokens, M = S + T keys, H hidden size, Q query heads, G key/value heads,
D head size, X any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash.model.layout import DrafterConfig

# Attention of a query [Q, T, D] over keys and values [G, M or T, D]: [Q, T, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rotary(NamedTuple):
    """Cosines and sines of the plain rotary embedding, fp32 [X, D / 2] each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position_X: Tensor, config: DrafterConfig) -> Rotary:
        """The rotation of each position; made on the fly, so that no buffer can be lost or rounded to bf16."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_X.device) / config.head_dim
        angle = position_X.float()[:, None] / config.rope_theta**exponent
        return cls(angle.cos(), angle.sin())

    def __call__(self, x_XD: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotate heads [..., X, D], whose halves form the rotated pairs, in fp32 and return them as `dtype`."""
        first, second = x_XD.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(dtype)


class Context(NamedTuple):
    """What a training step hands to every layer: projected features [S, H] and the rotation of their positions."""

    hidden_SH: Tensor
    rotary: Rotary


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, with a weight that multiplies the rounded result, as Qwen3 has it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        normed = functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normed.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_XH: Tensor) -> Tensor:
        """[X, H] to [X, H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_XH)) * self.up_proj(x_XH))
        return out


class Projections(nn.Module):
    """Query, key, value and output projections with per-head norms on queries and keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x_TH: Tensor, rotary: Rotary, dtype: torch.dtype) -> Tensor:
        """Queries [Q, T, D] of block tokens."""
        return rotary(self.q_norm(self._heads(self.q_proj(x_TH))), dtype)

    def keys_values(self, x_XH: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values [G, X, D]: the same projections, key norm and rotation for context and blocks."""
        values = self._heads(self.v_proj(x_XH))
        return rotary(self.k_norm(self._heads(self.k_proj(x_XH))), values.dtype), values

    def output(self, heads_QTD: Tensor) -> Tensor:
        """Back to the residual stream, [T, H]."""
        out: Tensor = self.o_proj(heads_QTD.transpose(0, 1).flatten(1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[X, heads * D] to [heads, X, D]."""
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim).transpose(0, 1)


class DraftLayer(nn.Module):
    """One draft layer. Context enters through keys and values alone: no norm, query, output or MLP of its own."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Projections(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TH: Tensor, rotary_T: Rotary, attend: Attend, context: Context | None = None) -> Tensor:
        """Update the block tokens.

        Every use of a weight in training is inside this call, so that sharding by layer works.

        Args:
            x_TH: residual stream of the block tokens.
            rotary_T: rotation of their positions.
            attend: attention; without `context` it adds cached keys and values itself.
            context: projected features and their rotation, put before the block tokens as keys and values.

        Returns:
            [T, H].
        """
        normed_TH = self.input_layernorm(x_TH)
        if context is None:
            keys, values = self.self_attn.keys_values(normed_TH, rotary_T)
        else:
            rotary_M = Rotary(
                torch.cat([context.rotary.cos, rotary_T.cos]), torch.cat([context.rotary.sin, rotary_T.sin])
            )
            keys, values = self.self_attn.keys_values(torch.cat([context.hidden_SH, normed_TH]), rotary_M)
        query = self.self_attn.query(normed_TH, rotary_T, values.dtype)
        x_TH = x_TH + self.self_attn.output(attend(query, keys, values))
        out: Tensor = x_TH + self.mlp(self.post_attention_layernorm(x_TH))
        return out
