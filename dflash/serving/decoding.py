"""Decoding of several prompts at once by a target of transformers.

Prompts are padded on the left; a row that is done leaves the batch when an eighth of the rows is, since copying the
cache for every single one would cost more than the tokens it saves.

Legend: b rows, X tokens of a pass, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.eval.sampling import Chooser, Sampling


@dataclass(frozen=True, slots=True)
class Decoding:
    """One prompt to continue.

    Attributes:
        prompt_ids: at least one.
        max_tokens: at most so many new ones.
        sampling: how they are chosen.
        top_k: likeliest ids that are chosen from; None for all.
        given_up: set it from any thread when nobody waits for the answer; what there is by then is the answer.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    top_k: int | None = None
    given_up: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(slots=True)
class _Row:
    """A prompt in work: what was sampled, and its own chance, so that neighbours don't change it."""

    index: int
    decoding: Decoding
    chooser: Chooser
    sampled: list[int]


@torch.inference_mode()
def decode_batch(
    model: Any, decodings: Sequence[Decoding], end_ids: Collection[int], is_stopped: Callable[[], bool] = bool
) -> list[list[int]]:
    """New ids of each prompt, an end id included where the model came to it.

    Greedy ids are those of the prompt alone up to rounding: sums run in another order in a batch.

    Args:
        model: a causal language model.
        decodings: at least one.
        end_ids: any of these ends a row.
        is_stopped: asked before each pass; all rows end with what they have. By default nobody stops it.
    """
    device = model.get_input_embeddings().weight.device
    rows = [_Row(i, one, Chooser(one.sampling), []) for i, one in enumerate(decodings)]
    results = {row.index: row.sampled for row in rows}
    width = max(len(one.prompt_ids) for one in decodings)
    padding = next(iter(end_ids), 0)
    ids = torch.tensor([[padding] * (width - len(r.decoding.prompt_ids)) + list(r.decoding.prompt_ids) for r in rows])
    seen = torch.tensor([[0] * (width - len(r.decoding.prompt_ids)) + [1] * len(r.decoding.prompt_ids) for r in rows])
    ids_bX, seen_bX = ids.to(device), seen.to(device)
    cache = DynamicCache(config=model.config)
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    while rows and not is_stopped():
        position_bX = (seen_bX.cumsum(dim=1) - 1).clamp(min=0)[:, -ids_bX.shape[1] :]
        output = model(
            input_ids=ids_bX,
            attention_mask=seen_bX,
            position_ids=position_bX,
            logits_to_keep=1,
            **{cache_name: cache},
        )
        next_b = _choose(output.logits[:, -1], rows, end_ids)
        ids_bX = next_b[:, None]
        seen_bX = torch.cat([seen_bX, torch.ones_like(ids_bX)], dim=1)
        going = [place for place, row in enumerate(rows) if not _is_done(row, end_ids)]
        if not going:
            break
        if len(going) <= len(rows) * 7 / 8:
            kept = torch.tensor(going, device=device)
            cache.batch_select_indices(kept)
            ids_bX, seen_bX = ids_bX[kept], seen_bX[kept]
            rows = [rows[place] for place in going]
    return [results[index] for index in range(len(decodings))]


def _choose(logits_bV: Tensor, rows: Sequence[_Row], end_ids: Collection[int]) -> Tensor:
    """The next id of each row, noted in it unless the row is done."""
    next_b = logits_bV.argmax(dim=-1)
    for place, row in enumerate(rows):
        if _is_done(row, end_ids):
            continue
        if not row.decoding.sampling.is_greedy:
            next_b[place] = row.chooser.next_token(_likeliest(logits_bV[place].float(), row.decoding.top_k))
        row.sampled.append(int(next_b[place]))
    return next_b


def _is_done(row: _Row, end_ids: Collection[int]) -> bool:
    has_ended = len(row.sampled) >= row.decoding.max_tokens or (bool(row.sampled) and row.sampled[-1] in end_ids)
    return has_ended or row.decoding.given_up.is_set()


def _likeliest(logits_V: Tensor, top_k: int | None) -> Tensor:
    if top_k is None or top_k >= len(logits_V):
        return logits_V
    return logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], float("-inf"))
