"""Where the blocks of a packed row begin (paper, section 4.2: anchors are drawn at random, anew each epoch).

Legend: S tokens of a packed row, N anchors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def eligible(loss_mask_S: Tensor, document_S: Tensor) -> Tensor:
    """Which tokens can begin a block: the target wrote this one and the next one of the same document.

    At inference a block begins at a token that the target has just written, so a prompt token never is an anchor.
    Blocks that reach beyond their document's end are allowed; their slots there get no weight.

    Args:
        loss_mask_S: bool [S].
        document_S: int64 [S], the document of each token.

    Returns:
        bool [S].
    """
    next_counts = loss_mask_S[1:] & (document_S[1:] == document_S[:-1])
    allowed_S = torch.zeros_like(loss_mask_S)
    allowed_S[:-1] = loss_mask_S[:-1] & next_counts
    return allowed_S


def sample_anchors(loss_mask_S: Tensor, document_S: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw anchors without replacement.

    Args:
        loss_mask_S: bool [S] on the CPU.
        document_S: int64 [S] on the CPU.
        n: how many; fewer come back where fewer tokens are eligible.
        generator: a CPU generator, so that the choice doesn't depend on the device.

    Returns:
        int64 [N], ascending, N at most `n`.
    """
    candidates = eligible(loss_mask_S, document_S).nonzero().flatten()
    order = torch.randperm(len(candidates), generator=generator)[:n]
    return candidates[order].sort().values
