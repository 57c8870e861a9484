"""The DFlash drafter: a small block-diffusion transformer conditioned on the target's hidden states.

Trained on many anchored blocks of a packed row at once, decoded one block at a time with a cache of context keys and
values. Both paths run the same layers and evaluate the same visibility rule.

Legend for shapes: S context tokens of a packed row, K target layers, H hidden size, N blocks, B slots of a block,
T = N * B, V vocabulary, L cached context tokens, Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash.errors import ModelError
from dflash.model.attention import Attention, Backend, BlockLayout, Keys, Queries, attend_all, sees
from dflash.model.layers import Context, DraftLayer, RMSNorm, Rotary
from dflash.model.layout import DrafterConfig


class Drafter(nn.Module):
    """The trainable part; embedding and head stay the target's and are passed in and applied by the caller.

    Its state dict is the official checkpoint: `layout.tensor_shapes` names all of it, without a prefix.

    Args:
        config: the network.
        attention: `sdpa` anywhere, `flex` on GPUs for long rows, `dense` as the oracle in tests.
        recompute: trade time for memory by recomputing each layer in the backward pass.
    """

    def __init__(self, config: DrafterConfig, attention: Backend = "sdpa", *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.attention: Backend = attention
        self.recompute = recompute
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.initialize()

    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Draw all matrices from a normal distribution (Qwen3's) and set all norms to one."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, std, generator=generator)

    def forward(self, features_SF: Tensor, embeddings_NBH: Tensor, layout: BlockLayout) -> Tensor:
        """Run all blocks of a packed row.

        Args:
            features_SF: the target's features [S, K * H], rows aligned with the row's ids (no shift).
            embeddings_NBH: slot 0 the embedding of the anchor token, the others that of the mask id.
            layout: anchors, positions, documents.

        Returns:
            [N, B, H] after the final norm: slot k >= 1 predicts the token at anchor + k through the target's head; slot
            0 means nothing.

        Raises:
            ModelError: lengths that don't belong together.
        """
        self._check(features_SF, embeddings_NBH, layout)
        config = self.config
        context = Context(self.context(features_SF), Rotary.at(layout.position_S, config))
        rotary_T = Rotary.at(layout.block_positions(config.block_size), config)
        attention = Attention(layout, config, self.attention)
        x_TH = embeddings_NBH.flatten(0, 1)
        for layer, layer_type in zip(self.layers, config.layer_types, strict=True):
            attend = functools.partial(attention, layer_type)
            if self.recompute and torch.is_grad_enabled():
                x_TH = checkpoint(layer, x_TH, rotary_T, attend, context, use_reentrant=False)
            else:
                x_TH = layer(x_TH, rotary_T, attend, context)
        out: Tensor = self.norm(x_TH)
        return out.view(embeddings_NBH.shape)

    def context(self, features_SF: Tensor) -> Tensor:
        """What every layer's keys and values read, [S, H]: projected and normalised once, never updated."""
        out: Tensor = self.hidden_norm(self.fc(features_SF))
        return out

    def layer(self, index: int) -> DraftLayer:
        """Draft layer `index`."""
        module = self.layers[index]
        assert isinstance(module, DraftLayer)
        return module

    def _check(self, features_SF: Tensor, embeddings_NBH: Tensor, layout: BlockLayout) -> None:
        config = self.config
        expected = {
            "features": (layout.position_S.numel(), config.feature_size),
            "embeddings": (layout.anchor_N.numel(), config.block_size, config.hidden_size),
        }
        found = {"features": tuple(features_SF.shape), "embeddings": tuple(embeddings_NBH.shape)}
        if expected != found:
            raise ModelError(
                f"features and blocks don't fit the row: expected {expected}, found {found}; features have one "
                "row for each id of the row, embeddings one block for each anchor"
            )


def block_embeddings(embed_weight_VH: Tensor, ids_S: Tensor, anchor_N: Tensor, config: DrafterConfig) -> Tensor:
    """Inputs of the blocks [N, B, H]: the anchor's token in slot 0, the mask id in all others."""
    ids_NB = ids_S.new_full((anchor_N.numel(), config.block_size), config.mask_token_id)
    ids_NB[:, 0] = ids_S[anchor_N]
    return nn.functional.embedding(ids_NB, embed_weight_VH)


class DraftCache:
    """Context keys and values of one sequence while decoding; blocks never enter it.

    A round: `extend` with the features of the tokens that the target has newly processed, then `draft` the block whose
    anchor is the last accepted token, which the target has not processed yet.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __len__(self) -> int:
        """L, context tokens held."""
        return self._length

    @torch.no_grad()
    def extend(self, features_XF: Tensor) -> None:
        """Append the features [X, K * H] of the X tokens at positions len(self) and up."""
        drafter, config = self._drafter, self._drafter.config
        if features_XF.dim() != 2 or features_XF.shape[1] != config.feature_size:
            raise ModelError(
                f"expected features [tokens, {config.feature_size}] of target layers {list(config.target_layer_ids)}, "
                f"found {tuple(features_XF.shape)}"
            )
        end = self._length + features_XF.shape[0]
        context_XH = drafter.context(features_XF)
        rotary_X = Rotary.at(torch.arange(self._length, end, device=features_XF.device), config)
        for index in range(config.num_hidden_layers):
            keys, values = drafter.layer(index).self_attn.keys_values(context_XH, rotary_X)
            if index == len(self._keys):
                self._keys.append(keys.new_empty(keys.shape[0], 0, keys.shape[2]))
                self._values.append(values.new_empty(values.shape[0], 0, values.shape[2]))
            self._keys[index] = _written(self._keys[index], keys, self._length)
            self._values[index] = _written(self._values[index], values, self._length)
        self._length = end

    def crop(self, length: int) -> None:
        """Forget the context from position `length` on."""
        if not 0 <= length <= self._length:
            raise ModelError(f"can't crop a draft cache of {self._length} tokens to {length}")
        self._length = length

    @torch.no_grad()
    def draft(self, embeddings_1BH: Tensor, position: int) -> Tensor:
        """Run the block anchored at `position`.

        Args:
            embeddings_1BH: as in `Drafter.forward`, one block.
            position: the anchor's; context at or after it stays hidden even when the cache holds it.

        Returns:
            [B, H] after the final norm; slot k >= 1 predicts the token at position + k.

        Raises:
            ModelError: features of positions below the anchor are missing.
        """
        if position > self._length:
            raise ModelError(
                f"a block at position {position} needs the features of {position} tokens, the cache holds "
                f"{self._length}: extend it first"
            )
        drafter, config = self._drafter, self._drafter.config
        slot_B = torch.arange(config.block_size, device=embeddings_1BH.device) + position
        rotary_B = Rotary.at(slot_B, config)
        x_BH = embeddings_1BH[0]
        for index in range(config.num_hidden_layers):
            x_BH = drafter.layer(index)(x_BH, rotary_B, _DecodeAttention(self, index, slot_B, position))
        out: Tensor = drafter.norm(x_BH)
        return out

    def context(self, index: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, end - first, D] of layer `index`."""
        return self._keys[index][:, first:end], self._values[index][:, first:end]

    @property
    def config(self) -> DrafterConfig:
        """The drafter's configuration."""
        return self._drafter.config


class _DecodeAttention:
    """Attention of one layer over cache and block: only rows inside the window, and a mask only where it slides."""

    def __init__(self, cache: DraftCache, index: int, slot_B: Tensor, position: int) -> None:
        self._layer_type = cache.config.layer_types[index]
        self._window = cache.config.sliding_window
        slides = self._layer_type == "sliding_attention"
        first = max(0, position - self._window + 1) if slides and self._window is not None else 0
        self._context = cache.context(index, first, position) if len(cache) else None
        self._mask = self._sliding_mask(slot_B, first, position) if slides else None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._context is not None:
            keys, values = (torch.cat(pair, dim=1) for pair in zip(self._context, (keys, values), strict=True))
        return attend_all(query, keys, values, self._mask)

    def _sliding_mask(self, slot_B: Tensor, first: int, position: int) -> Tensor:
        key_position = torch.cat([torch.arange(first, position, device=slot_B.device), slot_B])
        block = (key_position >= position).long() - 1
        zero = torch.zeros_like(slot_B)[:, None]
        queries = Queries(slot_B[:, None], zero + position, zero, zero)
        keys = Keys(key_position, torch.zeros_like(key_position), block)
        return sees(queries, keys, self._layer_type, self._window)


def _written(store: Tensor, new: Tensor, length: int) -> Tensor:
    """`store` [G, capacity, D] with `new` [G, X, D] written at `length`, grown by doubling where it is too small."""
    end = length + new.shape[1]
    if end > store.shape[1]:
        grown = store.new_empty(store.shape[0], max(end, 2 * store.shape[1]), store.shape[2])
        grown[:, :length] = store[:, :length]
        store = grown
    store[:, length:end] = new
    return store
