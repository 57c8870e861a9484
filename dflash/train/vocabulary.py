"""The ids that a drafter may say.

A drafter for a small machine spends most of a step on the head of the whole vocabulary. Restricted to the commonest
ids of the training data a step costs a quarter; a rarer id is never drafted, so its slot teaches nothing and ends the
accepted prefix at inference.

Legend: V vocabulary, D ids that may be drafted, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash.data.batches import BatchOrder, ShardSource
from dflash.train.loss import SlotTargets


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A part of the vocabulary.

    Attributes:
        ids_D: int64, ascending.
        index_V: int64, place of each id in `ids_D`, -1 where it has none.
    """

    ids_D: Tensor
    index_V: Tensor

    @classmethod
    def of(cls, ids: list[int], vocab_size: int, device: torch.device) -> DraftVocabulary:
        """Build both directions."""
        ids_D = torch.tensor(sorted(ids), dtype=torch.int64, device=device)
        index_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
        index_V[ids_D] = torch.arange(len(ids_D), device=device)
        return cls(ids_D, index_V)

    def head(self, head_VH: Tensor) -> Tensor:
        """Return the head's rows for these ids, [D, H]."""
        return head_VH[self.ids_D].contiguous()

    def renumber(self, targets: SlotTargets) -> SlotTargets:
        """Turn labels into places; slots whose label has none don't count."""
        place_NL = self.index_V[targets.label_NL]
        return replace(targets, label_NL=place_NL.clamp(min=0), counts_NL=targets.counts_NL & (place_NL >= 0))


def commonest_ids(source: ShardSource, vocab_size: int, size: int, max_tokens: int = 20_000_000) -> list[int]:
    """Return the `size` commonest ids among the tokens that the target wrote, ascending.

    Args:
        source: the dataset.
        vocab_size: V.
        size: D; ids that never occur fill it up, lowest first.
        max_tokens: tokens to look at.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    seen = 0
    for pack in BatchOrder(seed=0, pack_tokens=1 << 30, num_epochs=1).packs(source):
        written = [row.input_ids[row.loss_mask] for row in pack.rows]
        counts += np.bincount(np.concatenate(written), minlength=vocab_size)
        seen += pack.num_tokens
        if seen >= max_tokens:
            break
    return sorted(np.argsort(-counts, kind="stable")[:size].tolist())
