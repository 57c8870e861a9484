"""Who sees whom in a drafter layer, and three ways to compute it.

A row of S context tokens (the target's features) carries N blocks of B slots. Queries come from the blocks only; keys
are [context ; blocks]. `sees` is the one definition of visibility: it speaks of positions, documents and block numbers,
never of array offsets, and every backend evaluates it. In words:

* a block sees the context of its own document strictly before its anchor: at inference the last accepted token has not
  been through the target yet, so its state must stay hidden in training too;
* a block sees itself, never another block: in full layers all of it, in sliding layers only slots up to its own;
* in sliding layers of window W the slot at position p sees no position below p - (W - 1).

Legend for shapes: S context tokens, N blocks, B slots of a block, T = N * B block tokens, M = S + T keys, Q query
heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.errors import ModelError
from dflash.model.layout import DrafterConfig, LayerType

Backend = Literal["dense", "sdpa", "flex"]

# Query rows of one SDPA call. Few rows read few surplus keys, many rows start few kernels: of 16 to 512 on a CPU, 64
# was the fastest or within a tenth of it, and 1.6 to 3 times faster than one call over all keys.
CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of one packed row stand.

    Documents are contiguous and positions count up by one inside a document. Anchors in ascending order are faster in
    the SDPA backend; any order is right.

    Attributes:
        anchor_N: int64, row index of each block's anchor.
        position_S: int64, position of each token in its own document.
        document_S: int64, document of each token; padding carries a number of its own, such as -1.
    """

    anchor_N: Tensor
    position_S: Tensor
    document_S: Tensor

    def __post_init__(self) -> None:
        if self.position_S.shape != self.document_S.shape or self.position_S.dim() != 1 or self.anchor_N.dim() != 1:
            raise ModelError(
                "a block layout needs anchor [N], position [S] and document [S], found "
                f"{tuple(self.anchor_N.shape)}, {tuple(self.position_S.shape)} and {tuple(self.document_S.shape)}"
            )
        if not self.anchor_N.numel():
            raise ModelError("a block layout needs at least one anchor, found none: leave such a row out")

    @classmethod
    def single(cls, anchor_N: Tensor, num_tokens: int) -> BlockLayout:
        """The layout of a row that holds one document of `num_tokens` tokens."""
        position_S = torch.arange(num_tokens, device=anchor_N.device)
        return cls(anchor_N=anchor_N, position_S=position_S, document_S=torch.zeros_like(position_S))

    def block_positions(self, block_size: int) -> Tensor:
        """Positions of the T block tokens: slot j of a block anchored at position a stands at a + j."""
        slot_B = torch.arange(block_size, device=self.anchor_N.device)
        return (self.position_S[self.anchor_N][:, None] + slot_B).flatten()


class Queries(NamedTuple):
    """Coordinates of block tokens: own position, position of the anchor, document, block number."""

    position: Tensor
    anchor: Tensor
    document: Tensor
    block: Tensor


class Keys(NamedTuple):
    """Coordinates of keys: position, document, block number (-1 for context)."""

    position: Tensor
    document: Tensor
    block: Tensor


def sees(queries: Queries, keys: Keys, layer_type: LayerType, window: int | None) -> Tensor:
    """Whether each query sees each key; the two broadcast against one another."""
    context = (keys.block < 0) & (keys.document == queries.document) & (keys.position < queries.anchor)
    seen = context | (keys.block == queries.block)
    if layer_type == "sliding_attention":
        assert window is not None
        seen = seen & (keys.position <= queries.position) & (keys.position > queries.position - window)
    return seen


def coordinates(layout: BlockLayout, block_size: int) -> tuple[Queries, Keys]:
    """Coordinates of the T block tokens as queries and of the M keys [context ; blocks]."""
    anchor_T = layout.anchor_N.repeat_interleave(block_size)
    position_T = layout.block_positions(block_size)
    block_T = torch.arange(layout.anchor_N.numel(), device=anchor_T.device).repeat_interleave(block_size)
    document_T = layout.document_S[anchor_T]
    queries = Queries(position_T, layout.position_S[anchor_T], document_T, block_T)
    keys = Keys(
        torch.cat([layout.position_S, position_T]),
        torch.cat([layout.document_S, document_T]),
        torch.cat([torch.full_like(layout.position_S, -1), block_T]),
    )
    return queries, keys


def visible(layout: BlockLayout, block_size: int, layer_type: LayerType, window: int | None) -> Tensor:
    """The whole mask as a bool tensor [T, M]; for tests and the dense backend."""
    queries, keys = coordinates(layout, block_size)
    return sees(_column(queries), keys, layer_type, window)


class Attention:
    """Attention of one forward pass: masks are made once and shared by all layers of a type."""

    def __init__(self, layout: BlockLayout, config: DrafterConfig, backend: Backend) -> None:
        self._layout = layout
        self._config = config
        self._backend = backend
        self._queries, self._keys = coordinates(layout, config.block_size)
        make: dict[Backend, Callable[[LayerType], Any]] = {
            "dense": self._dense_mask,
            "sdpa": self._chunks,
            "flex": self._flex_mask,
        }
        self._masks = {layer_type: make[backend](layer_type) for layer_type in sorted(set(config.layer_types))}

    def __call__(self, layer_type: LayerType, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from all block tokens.

        Args:
            layer_type: which mask.
            query: [Q, T, D].
            keys: [G, M, D], context before blocks.
            values: [G, M, D].

        Returns:
            [Q, T, D].
        """
        mask = self._masks[layer_type]
        if self._backend == "dense":
            return _dense(query, keys, values, mask)
        if self._backend == "flex":
            return _flex(query, keys, values, mask)
        parts = [_chunk(query, keys, values, chunk) for chunk in mask]
        return torch.cat(parts, dim=1)

    def _dense_mask(self, layer_type: LayerType) -> Tensor:
        return sees(_column(self._queries), self._keys, layer_type, self._config.sliding_window)

    def _chunks(self, layer_type: LayerType) -> list[_Chunk]:
        """Cut the blocks into chunks and give each the context rows that any of its slots can see."""
        window, size = self._config.sliding_window, self._config.block_size
        anchor = self._layout.anchor_N
        start = (anchor - self._layout.position_S[anchor]).clamp(min=0)
        if layer_type == "sliding_attention" and window is not None:
            start = torch.maximum(start, anchor - (window - 1))
        starts, ends = start.tolist(), anchor.tolist()
        num_context, step = self._layout.position_S.numel(), max(1, CHUNK_ROWS // size)
        chunks = []
        for first in range(0, len(ends), step):
            blocks = slice(first, first + step)
            context = slice(min(starts[blocks]), max(ends[blocks]))
            rows = slice(first * size, min(first + step, len(ends)) * size)
            own = slice(num_context + rows.start, num_context + rows.stop)
            keys = Keys(*(torch.cat([values[context], values[own]]) for values in self._keys))
            queries = Queries(*(values[rows] for values in self._queries))
            chunks.append(_Chunk(rows, context, own, sees(_column(queries), keys, layer_type, window)))
        return chunks

    def _flex_mask(self, layer_type: LayerType) -> BlockMask:
        queries, keys, window = self._queries, self._keys, self._config.sliding_window

        def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            at_query = Queries(
                queries.position[query], queries.anchor[query], queries.document[query], queries.block[query]
            )
            at_key = Keys(keys.position[key], keys.document[key], keys.block[key])
            return sees(at_query, at_key, layer_type, window)

        device = queries.position.device
        make: Callable[..., Any] = _compiled_block_mask() if device.type == "cuda" else create_block_mask
        num_queries, num_keys = queries.position.numel(), keys.position.numel()
        return cast("BlockMask", make(mask_mod, None, None, num_queries, num_keys, device=str(device)))


def attend_all(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention of query [Q, R, D] over keys and values [G, L, D] under an optional mask [R, L]."""
    if mask is not None and query.device.type == "cuda":
        # With a mask only the memory-efficient kernel avoids all scores at once there, and it wants equal heads.
        groups = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
    out: Tensor = functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0]


class _Chunk(NamedTuple):
    """Query rows that share one SDPA call, the keys they need, and the mask over exactly those keys."""

    rows: slice
    context: slice
    own: slice
    mask: Tensor


def _column(queries: Queries) -> Queries:
    return Queries(*(values[:, None] for values in queries))


def _dense(query: Tensor, keys: Tensor, values: Tensor, mask_TM: Tensor) -> Tensor:
    """The oracle: every score, in fp32, straight from the definition."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
    scores_QTM = query.float() @ keys.float().transpose(1, 2) * query.shape[-1] ** -0.5
    weights_QTM = scores_QTM.masked_fill(~mask_TM, float("-inf")).softmax(dim=-1)
    out: Tensor = (weights_QTM @ values.float()).to(values.dtype)
    return out


def _chunk(query: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk) -> Tensor:
    """One SDPA call over a chunk's own context rows and blocks."""
    own_keys = torch.cat([keys[:, chunk.context], keys[:, chunk.own]], dim=1)
    own_values = torch.cat([values[:, chunk.context], values[:, chunk.own]], dim=1)
    return attend_all(query[:, chunk.rows], own_keys, own_values, chunk.mask)


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    if query.device.type != "cuda" and torch.is_grad_enabled() and query.requires_grad:
        raise ModelError(
            f"torch {torch.__version__} has no backward pass for flex attention on {query.device.type}: "
            'train there with attention="sdpa"'
        )
    attend = _compiled_flex() if query.device.type == "cuda" else cast("Callable[..., Tensor]", flex_attention)
    return attend(query[None], keys[None], values[None], block_mask=mask, enable_gqa=True)[0]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Compiled once for all lengths: anchors and rows change every step and must not recompile."""
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    """Compiled, so that the block-sparse mask is made without the dense [T, M] grid."""
    return torch.compile(create_block_mask, dynamic=True)
