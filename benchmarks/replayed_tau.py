"""Tau on answers that are known: the rounds of a greedy speculative decode, without decoding by the target again.

What the target would say is written down already, and its features of a whole answer come from one pass, so a
checkpoint costs the drafter's rounds alone: seconds in place of minutes on a CPU. The rounds are those of free-running
decoding up to rounding; a last round that an answer's limit of tokens cuts is left out. Measure the final tau by
`dflash.eval`, which runs free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.answers import Answer
from dflash.model.drafter import DraftCache, Drafter, block_embeddings
from dflash.model.features import Target


class ReplayedTau:
    """Answers with the target's features of them.

    Args:
        target: captures the layers that the drafters read.
        answers: of that target, greedy.
    """

    def __init__(self, target: Target, answers: Sequence[Answer]) -> None:
        self._target = target
        self._answers = [(one, target.features(torch.tensor(one.prompt + one.answer))) for one in answers]

    @torch.inference_mode()
    def of(self, drafter: Drafter) -> float:
        """Mean of accepted drafts and one more, over the rounds of all answers."""
        drafter.eval()
        found = [self._rounds(drafter, one, features_SF) for one, features_SF in self._answers]
        return sum(map(sum, found)) / max(1, sum(map(len, found))) + 1

    def _rounds(self, drafter: Drafter, one: Answer, features_SF: Tensor) -> list[int]:
        num_prompt, num_drafts = len(one.prompt), drafter.config.num_draft_tokens
        cache, found, done = DraftCache(drafter), [], 1
        while done < len(one.answer):
            cache.extend(features_SF[len(cache) : num_prompt + done - 1])
            drafts = self._drafts(drafter, cache, one.answer[done - 1], num_prompt + done - 1)
            wanted = one.answer[done : done + num_drafts]
            accepted = next((k for k, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(wanted))
            if not one.is_whole and done + accepted >= len(one.answer):
                break
            found.append(accepted)
            done += accepted + 1
        return found

    def _drafts(self, drafter: Drafter, cache: DraftCache, anchor: int, position: int) -> list[int]:
        ids = torch.tensor([anchor])
        embeddings = block_embeddings(self._target.embedding_VH, ids, torch.zeros_like(ids), drafter.config)
        hidden_BH = cache.draft(embeddings, position)
        return [int(one) for one in (hidden_BH[1:] @ self._target.head_VH.T).argmax(dim=-1)]
