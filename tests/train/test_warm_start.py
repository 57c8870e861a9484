from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dflash.data.batches import BatchOrder, LocalShards, Pack
from dflash.errors import TrainingError
from dflash.model.attention import BlockLayout, visible
from dflash.model.drafter import Drafter, block_embeddings
from dflash.model.layers import Rotary
from dflash.train.loss import block_loss, slot_targets
from dflash.train.loss_options import LossOptions
from dflash.train.packed import PackedRow
from dflash.train.vocabulary import count_written_ids
from dflash.train.warm_start import prior_state, warm_start
from tests.train.conftest import VOCAB, tiny_config, write_rows

MakeDrafter = Callable[..., Drafter]


def packs_of(source: LocalShards) -> list[Pack]:
    return list(BatchOrder(seed=0, pack_tokens=64, num_epochs=1).packs(source))


def loss_of(drafter: Drafter, target: Any, pack: Pack) -> float:
    packed = PackedRow.of(pack.rows)
    anchors = torch.tensor([at for at in range(len(packed.ids_S) - 1) if packed.loss_mask_S[at]])
    features = target.features(packed.ids_S, packed.position_S, packed.document_S)
    embeddings = block_embeddings(target.embedding_VH, packed.ids_S, anchors, drafter.config)
    hidden = drafter(features, embeddings, BlockLayout(anchors, packed.position_S, packed.document_S))
    size = drafter.config.block_size
    targets = slot_targets(packed.ids_S, packed.loss_mask_S, packed.document_S, anchors, size)
    sums = block_loss(hidden, target.head_VH * 4, targets, LossOptions())
    return float(sums.numerator.detach() / sums.weight)


def test_the_prior_says_the_frequencies_of_the_tokens() -> None:
    head = torch.randn(50, 12, generator=torch.Generator().manual_seed(3))
    scale = torch.linspace(0.5, 1.5, 12)
    direction = torch.randn(12, generator=torch.Generator().manual_seed(4))
    p = torch.softmax(head @ (functional.rms_norm(direction, (12,)) * scale), dim=0)
    state = prior_state(head, p * 1e6, scale, 1e-6)
    said = torch.softmax(head @ (functional.rms_norm(state, (12,)) * scale), dim=0)
    assert abs(float(state.norm()) - 1) < 1e-5
    torch.testing.assert_close(said, p, rtol=0.02, atol=1e-4)


def test_the_first_loss_is_a_fraction_of_that_of_random_states(
    target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    cold, warm = make_drafter(), make_drafter()
    packs = packs_of(source)
    counts = torch.from_numpy(count_written_ids(source, VOCAB))
    target.head_VH = target.head_VH * 4
    warm_start(warm, target, packs[:2], counts)
    target.head_VH = target.head_VH / 4
    before, after = (np.mean([loss_of(drafter, target, pack) for pack in packs[2:]]) for drafter in (cold, warm))
    assert after < before / 3, (before, after)


def test_heads_begin_by_looking_at_near_tokens(target: Any, tmp_path: Path) -> None:
    rows = np.random.default_rng(2).integers(1, VOCAB, (8, 60)).tolist()
    source = LocalShards.scan([write_rows(tmp_path / "long.arrow", rows)])
    packs = packs_of(source)
    cold, warm = (Drafter(tiny_config().model_copy(update={"head_dim": 32})) for _ in range(2))
    for drafter in (cold, warm):
        drafter.initialize(torch.Generator().manual_seed(1))
    warm_start(warm, target, packs[:4], torch.from_numpy(count_written_ids(source, VOCAB)))
    before, after = (np.mean([_nearness(drafter, target, pack) for pack in packs[4:]]) for drafter in (cold, warm))
    assert before < 0.2
    assert after > 2 * before, (before, after)


def _nearness(drafter: Drafter, target: Any, pack: Pack) -> float:
    """The share of the attention of slot 1 that the anchor and the three tokens before it get, over the first head."""
    row = PackedRow.of(pack.rows[:1])
    anchor = torch.tensor([len(row.ids_S) - 2])
    layout = BlockLayout(anchor, row.position_S, row.document_S)
    layer, size = drafter.layer(0), drafter.config.block_size
    context = drafter.context(target.features(row.ids_S, row.position_S, row.document_S))
    block = layer.input_layernorm(block_embeddings(target.embedding_VH, row.ids_S, anchor, drafter.config)[0])
    positions = torch.cat([row.position_S, layout.block_positions(size)])
    keys, values = layer.self_attn.keys_values(torch.cat([context, block]), Rotary.at(positions, drafter.config))
    query = layer.self_attn.query(block, Rotary.at(layout.block_positions(size), drafter.config), values.dtype)
    scores = query @ keys.repeat_interleave(len(query) // len(keys), dim=0).transpose(1, 2) * query.shape[-1] ** -0.5
    seen = visible(layout, size, "full_attention", None)
    share = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)[:, 1].mean(dim=0)
    at = int(anchor)
    return float((share[at - 3 : at].sum() + share[len(row.ids_S)]).detach())


def test_rows_without_supervision_are_an_error(target: Any, make_drafter: MakeDrafter, source: LocalShards) -> None:
    pack = packs_of(source)[0]
    rows = tuple(type(row)(row.key, row.input_ids, row.loss_mask & False, "", "") for row in pack.rows)
    bare = Pack(rows, 0, 0, pack.after)
    with pytest.raises(TrainingError, match="warm_start off"):
        warm_start(make_drafter(), target, [bare], torch.ones(VOCAB))
