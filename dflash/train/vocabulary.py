"""The ids that a step's loss looks at.

A drafter for a small machine spends most of a step on the head of the whole vocabulary. A sampled softmax costs a
quarter: the commonest ids of the training data always take part, the labels of the step do, and so does a random sample
of all others, anew in each micro-batch and weighted for those it stands for. The drafter so learns to leave alone what
never occurs, and drafts over the whole head like any other.

Legend: V vocabulary, C ids that always take part, E ids of a micro-batch, H hidden size, N blocks, L predicted slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash.data.batches import BatchOrder, ShardSource
from dflash.train.loss import SlotTargets

# Of the ids of a micro-batch, the share that is drawn at random.
DRAWN_SHARE = 0.125


class SampledHead(NamedTuple):
    """The part of the head that a micro-batch is trained on.

    Attributes:
        head_EH: rows of the target's head.
        offset_E: added to the logits: the log of how many ids each stands for.
        targets: with labels renumbered to these rows.
    """

    head_EH: Tensor
    offset_E: Tensor
    targets: SlotTargets


@dataclass(frozen=True, slots=True)
class LossVocabulary:
    """The commonest ids, and how to sample the others.

    Attributes:
        place_V: int64, place of each id among the commonest in order of id, -1 where it has none.
        common_head_CH: the head's rows of the commonest.
        num_drawn: ids drawn from all others.
    """

    place_V: Tensor
    common_head_CH: Tensor
    num_drawn: int

    @classmethod
    def of(cls, counts_V: npt.NDArray[np.int64], size: int, head_VH: Tensor) -> LossVocabulary:
        """Choose the commonest ids.

        Args:
            counts_V: occurrences of each id.
            size: ids of a micro-batch, `DRAWN_SHARE` of them drawn; less than V.
            head_VH: the target's head.
        """
        num_drawn = max(1, round(size * DRAWN_SHARE))
        common = np.sort(np.argsort(-counts_V, kind="stable")[: size - num_drawn])
        common_C = torch.from_numpy(common).to(head_VH.device)
        place_V = torch.full((len(counts_V),), -1, dtype=torch.int64, device=head_VH.device)
        place_V[common_C] = torch.arange(len(common_C), device=head_VH.device)
        return cls(place_V, head_VH[common_C].contiguous(), num_drawn)

    def sample(self, head_VH: Tensor, targets: SlotTargets, generator: torch.Generator) -> SampledHead:
        """Draw the ids of a micro-batch.

        Args:
            head_VH: the target's head.
            targets: labels by id.
            generator: on the CPU; it alone decides what is drawn.
        """
        labels = torch.unique(targets.label_NL[targets.counts_NL])
        rare = labels[self.place_V[labels] < 0]
        rest = self.place_V < 0
        rest[rare] = False
        candidates = rest.nonzero().flatten()
        chosen = torch.randint(len(candidates), (self.num_drawn,), generator=generator) if len(candidates) else None
        drawn = candidates[:0] if chosen is None else candidates[torch.unique(chosen).to(candidates.device)]
        extra = torch.cat([rare, drawn])
        offset_E = torch.zeros(len(self.common_head_CH) + len(extra), device=head_VH.device)
        if len(drawn):
            offset_E[-len(drawn) :] = math.log(len(candidates) / len(drawn))
        place_V = self.place_V.clone()
        place_V[extra] = torch.arange(len(self.common_head_CH), len(offset_E), device=head_VH.device)
        # A label that doesn't count may be none of these ids: any place will do.
        renumbered = replace(targets, label_NL=place_V[targets.label_NL].clamp(min=0))
        return SampledHead(torch.cat([self.common_head_CH, head_VH[extra]]), offset_E, renumbered)


def count_written_ids(source: ShardSource, vocab_size: int, max_tokens: int = 20_000_000) -> npt.NDArray[np.int64]:
    """Count the ids that the target wrote, [V].

    Args:
        source: the dataset.
        vocab_size: V.
        max_tokens: tokens to look at.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    seen = 0
    for pack in BatchOrder(seed=0, pack_tokens=1 << 30, num_epochs=1).packs(source):
        written = [row.input_ids[row.loss_mask] for row in pack.rows]
        counts_V += np.bincount(np.concatenate(written), minlength=vocab_size)
        seen += pack.num_tokens
        if seen >= max_tokens:
            break
    return counts_V
