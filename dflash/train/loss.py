"""The training loss, a chunk of blocks at a time.

The frozen head makes V logits for each of N*(B-1) slots: 512 anchors, 15 slots and 248,320 ids are 7.6 GB in fp32.
Only the gradient of the hidden states is needed, so each chunk computes its logits, adds to the loss, turns the logits
in place into their gradient, multiplies that with the head and forgets them. Against checkpointing it saves the third
matrix product (measured on one CPU thread, forward and backward of 32 blocks of 8, hidden size 576, 49,152 ids, in
chunks of 8 blocks: 0.66 s against 0.96 s; all logits at once 0.55 s).

Legend: N blocks, B slots of a block (slot 0 is the anchor), L = B-1 predicted slots, H hidden size, V vocabulary,
S tokens of the packed row, M slots of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.errors import UsageError
from dflash.train.loss_options import LossOptions


@dataclass(frozen=True, slots=True)
class SlotTargets:
    """What each predicted slot should say.

    Attributes:
        label_NL: int64, slot k of a block at a predicts token a+k (no shift).
        counts_NL: bool, false beyond the document's end and on tokens that the target didn't write. A supervised token
            behind a gap in supervision counts.
        teacher_row_NL: int64, the row whose final target state gives the distribution of that token: a+k-1.
    """

    label_NL: Tensor
    counts_NL: Tensor
    teacher_row_NL: Tensor


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums that add up over chunks, micro-batches and ranks.

    Attributes:
        numerator: scalar with gradient; the loss is the global numerator over the global `weight`.
        weight: scalar fp64 without gradient.
        hits_L: fp64 [L], counted slots whose likeliest id was the right one.
        counts_L: fp64 [L], counted slots.
    """

    numerator: Tensor
    weight: Tensor
    hits_L: Tensor
    counts_L: Tensor


def slot_targets(
    ids_S: Tensor, loss_mask_S: Tensor, document_S: Tensor, anchor_N: Tensor, block_size: int
) -> SlotTargets:
    """Look up labels and validity of all predicted slots.

    Args:
        ids_S: int64 [S].
        loss_mask_S: bool [S].
        document_S: int64 [S].
        anchor_N: int64 [N].
        block_size: B.
    """
    last = len(ids_S) - 1
    slot_L = torch.arange(1, block_size, device=ids_S.device)
    row_NL = anchor_N[:, None] + slot_L
    inside_NL = row_NL <= last
    row_NL = row_NL.clamp(max=last)
    same_NL = document_S[row_NL] == document_S[anchor_N][:, None]
    return SlotTargets(ids_S[row_NL], inside_NL & same_NL & loss_mask_S[row_NL], row_NL - 1)


def block_loss(
    hidden_NBH: Tensor,
    head_VH: Tensor,
    targets: SlotTargets,
    options: LossOptions,
    teacher_SH: Tensor | None = None,
    offset_V: Tensor | None = None,
) -> LossSums:
    """Sum the loss of all blocks.

    Args:
        hidden_NBH: the drafter's final states; slot 0 is not used.
        head_VH: the target's frozen output head, or a sample of its rows, with labels renumbered.
        targets: of these blocks.
        options: objective, weights, chunk.
        teacher_SH: the target's final states behind its last norm; needed for `kl`.
        offset_V: added to the logits of sampled rows; accuracy is counted without it.

    Raises:
        UsageError: `kl` without `teacher_SH`.
    """
    if options.objective == "kl" and teacher_SH is None:
        raise UsageError("The objective `kl` needs the target's final states. Use `cross_entropy`, or pass teacher_SH.")
    run: Any = _ChunkedLoss.apply
    numerator, weight, hits_L, counts_L = run(hidden_NBH[:, 1:], _Head(head_VH, offset_V), targets, options, teacher_SH)
    return LossSums(numerator, weight, hits_L, counts_L)


def slot_weights(nll_NL: Tensor, counts_NL: Tensor, options: LossOptions) -> Tensor:
    """Weigh each slot; slots that don't count get 0.

    Args:
        nll_NL: fp32, -log of the drafter's probability of the label (used by `d_pace` only).
        counts_NL: bool.
        options: weighting, gamma, alpha.

    Returns:
        fp32 [N, L].
    """
    if options.weighting == "decay":
        slot_L = torch.arange(counts_NL.shape[1], device=counts_NL.device, dtype=torch.float32)
        return counts_NL * torch.exp(-slot_L / options.gamma)
    confidence_NL = (1 - options.alpha) * torch.exp(-nll_NL) + options.alpha
    # A slot that doesn't count neither ends the prefix nor adds to what an accepted prefix is worth.
    prefix_NL = torch.where(counts_NL, confidence_NL, 1.0).cumprod(dim=1) * counts_NL
    return counts_NL * prefix_NL.flip(1).cumsum(dim=1).flip(1)


class _Head(NamedTuple):
    """Rows of the head, and what is added to their logits."""

    rows_VH: Tensor
    offset_V: Tensor | None


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradient of the hidden states in one pass over chunks of blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NLH: Tensor,
        head: _Head,
        targets: SlotTargets,
        options: LossOptions,
        teacher_SH: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_slots = hidden_NLH.shape[1]
        numerator = torch.zeros((), dtype=torch.float32, device=hidden_NLH.device)
        sums_XL = torch.zeros(3, num_slots, dtype=torch.float64, device=hidden_NLH.device)
        grad_NLH = torch.zeros_like(hidden_NLH, memory_format=torch.contiguous_format)
        for start in range(0, len(hidden_NLH), options.chunk_blocks):
            part = slice(start, start + options.chunk_blocks)
            teacher_MH = None if teacher_SH is None else teacher_SH[targets.teacher_row_NL[part].flatten()]
            chunk = _Chunk(hidden_NLH[part], head, targets.label_NL[part], targets.counts_NL[part])
            loss, weight_NL, hit_NL = chunk.run(options, teacher_MH, grad_NLH[part])
            numerator += loss
            rows = (weight_NL, hit_NL & chunk.counts_NL, chunk.counts_NL)
            sums_XL += torch.stack([row.double().sum(dim=0) for row in rows])
        ctx.save_for_backward(grad_NLH)
        weight = sums_XL[0].sum()
        if options.weighting == "d_pace":
            # The weights are credit towards the accepted length; dividing by their sum would cancel it.
            weight = targets.counts_NL.any(dim=1).sum().double()
        hits_L, counts_L = sums_XL[1].clone(), sums_XL[2].clone()
        ctx.mark_non_differentiable(weight, hits_L, counts_L)
        return numerator, weight, hits_L, counts_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NLH,) = ctx.saved_tensors
        return grad_NLH * grads[0], None, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some blocks with their labels."""

    hidden_NLH: Tensor
    head: _Head
    label_NL: Tensor
    counts_NL: Tensor

    def run(self, options: LossOptions, teacher_MH: Tensor | None, grad_NLH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chunk's loss, weights and hits, and write its gradient into `grad_NLH`."""
        hidden_MH = self.hidden_NLH.reshape(-1, self.hidden_NLH.shape[-1]).to(self.head.rows_VH.dtype)
        label_M1 = self.label_NL.reshape(-1, 1)
        p_MV = (hidden_MH @ self.head.rows_VH.T).float()
        max_M1 = p_MV.amax(dim=1, keepdim=True)
        score_M1 = p_MV.gather(1, label_M1)
        hit_NL = (score_M1 >= max_M1).view_as(self.label_NL)
        if self.head.offset_V is not None:
            p_MV.add_(self.head.offset_V)
            max_M1 = p_MV.amax(dim=1, keepdim=True)
            score_M1 = p_MV.gather(1, label_M1)
        p_MV.sub_(max_M1).exp_()
        total_M1 = p_MV.sum(dim=1, keepdim=True)
        nll_M1 = total_M1.log() + max_M1 - score_M1
        p_MV.div_(total_M1)
        weight_NL = slot_weights(nll_M1.view_as(self.label_NL), self.counts_NL, options)
        weight_M1 = weight_NL.reshape(-1, 1)
        if options.objective == "cross_entropy":
            value_M1 = nll_M1
            p_MV.scatter_add_(1, label_M1, p_MV.new_full((1, 1), -1.0).expand_as(label_M1))
        else:
            assert teacher_MH is not None
            value_M1 = _kl_in_place(p_MV, (teacher_MH.to(self.head.rows_VH.dtype) @ self.head.rows_VH.T).float())
        # A slot without weight may hold anything, so its value is left out, not multiplied by 0.
        loss = torch.where(weight_M1 > 0, value_M1 * weight_M1, 0.0).sum()
        p_MV.mul_(weight_M1)
        grad_NLH.copy_((p_MV.to(self.head.rows_VH.dtype) @ self.head.rows_VH).view_as(grad_NLH))
        return loss, weight_NL, hit_NL


def _kl_in_place(p_MV: Tensor, teacher_logits_MV: Tensor) -> Tensor:
    """Return KL(target || drafter) per slot [M, 1] and turn `p_MV` into its gradient by the drafter's logits."""
    log_t_MV = torch.log_softmax(teacher_logits_MV, dim=1)
    t_MV = log_t_MV.exp()
    tiny = torch.finfo(p_MV.dtype).tiny
    value_M1 = (t_MV * (log_t_MV - p_MV.clamp(min=tiny).log())).sum(dim=1, keepdim=True)
    p_MV.sub_(t_MV)
    return value_M1
