"""What a run minimises, said without torch: run models are read on machines that have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Objective = Literal["cross_entropy", "kl"]
Weighting = Literal["decay", "d_pace"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What is minimised.

    Attributes:
        objective: cross entropy with the dataset's tokens, or KL(target || drafter).
        weighting: `decay` is exp(-(k-1)/gamma) for slot k; `d_pace` follows arXiv:2605.18810, equations 7 to 9: with q
            the drafter's probability of the right token and q' = (1-alpha) q + alpha, slot j weighs the sum over
            m >= j of the products q'_1 ... q'_m. These weights carry no gradient, and the loss is divided by the number
            of blocks.
        gamma: of `decay`.
        alpha: of `d_pace`.
        chunk_blocks: blocks whose logits exist at once.
    """

    objective: Objective = "cross_entropy"
    weighting: Weighting = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    chunk_blocks: int = 32
