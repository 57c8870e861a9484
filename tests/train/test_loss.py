from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.errors import UsageError
from dflash.train.loss import LossOptions, SlotTargets, block_loss, slot_targets, slot_weights

V, H, S = 23, 8, 40


def batch(seed: int, blocks: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, SlotTargets]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (S,), generator=g)
    mask = torch.rand(S, generator=g) > 0.3
    document = (torch.arange(S) >= 17).long()
    anchor = torch.randint(S - 1, (blocks,), generator=g)
    hidden = torch.randn(blocks, block_size, H, generator=g, dtype=torch.float64)
    head = torch.randn(V, H, generator=g, dtype=torch.float64)
    teacher = torch.randn(S, H, generator=g, dtype=torch.float64)
    return hidden, head, teacher, slot_targets(ids, mask, document, anchor, block_size)


def naive(
    hidden: Tensor, head: Tensor, targets: SlotTargets, options: LossOptions, teacher: Tensor
) -> tuple[Tensor, float]:
    """One slot after the other, all by autograd."""
    total, weight_sum = hidden.new_zeros(()), 0.0
    for block in range(len(hidden)):
        log_p = torch.log_softmax(hidden[block, 1:] @ head.T, dim=-1)
        counts, labels = targets.counts_NL[block], targets.label_NL[block]
        nll = -log_p[torch.arange(len(labels)), labels]
        for k in range(1, len(labels) + 1):
            if not counts[k - 1]:
                continue
            weight = float(torch.exp(torch.tensor(-(k - 1) / options.gamma)))
            if options.weighting == "d_pace":
                q = (1 - options.alpha) * torch.exp(-nll.detach()) + options.alpha
                used = [m for m in range(len(labels)) if counts[m]]
                weight = sum(float(q[[m for m in used if m <= end]].prod()) for end in used if end >= k - 1)
            value = nll[k - 1]
            if options.objective == "kl":
                log_t = torch.log_softmax(teacher[targets.teacher_row_NL[block, k - 1]] @ head.T, dim=-1)
                value = (log_t.exp() * (log_t - log_p[k - 1])).sum()
            total = total + weight * value
            weight_sum += weight
    if options.weighting == "d_pace":
        weight_sum = float(targets.counts_NL.any(dim=1).sum())
    return total, weight_sum


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    blocks=st.integers(1, 7),
    block_size=st.integers(2, 6),
    chunk=st.integers(1, 8),
    objective=st.sampled_from(["cross_entropy", "kl"]),
    weighting=st.sampled_from(["decay", "d_pace"]),
)
def test_value_and_gradient_equal_the_naive_reference(
    seed: int, blocks: int, block_size: int, chunk: int, objective: str, weighting: str
) -> None:
    hidden, head, teacher, targets = batch(seed, blocks, block_size)
    options = LossOptions(objective, weighting, gamma=3.0, alpha=0.4, chunk_blocks=chunk)  # type: ignore[arg-type]
    expected_hidden = hidden.clone().requires_grad_()
    expected, weight = naive(expected_hidden, head, targets, options, teacher)
    (expected * 1.5).backward() if expected.requires_grad else None
    actual_hidden = hidden.clone().requires_grad_()
    sums = block_loss(actual_hidden, head, targets, options, teacher)
    (sums.numerator * 1.5).backward()
    torch.testing.assert_close(sums.numerator.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-5)
    grad = torch.zeros_like(hidden) if expected_hidden.grad is None else expected_hidden.grad
    torch.testing.assert_close(actual_hidden.grad, grad, rtol=1e-4, atol=1e-5)


def test_slot_k_predicts_token_a_plus_k_and_stops_at_the_document_and_at_unwritten_tokens() -> None:
    ids = torch.arange(100, 110)
    mask = torch.tensor([False, True, True, True, False, True, True, True, True, True])
    document = torch.tensor([0] * 7 + [1] * 3)
    targets = slot_targets(ids, mask, document, torch.tensor([1, 5, 8]), block_size=6)
    assert targets.label_NL[0].tolist() == [102, 103, 104, 105, 106]
    assert targets.teacher_row_NL[0].tolist() == [1, 2, 3, 4, 5]
    assert targets.counts_NL.tolist() == [
        [True, True, False, True, True],
        [True, False, False, False, False],
        [True, False, False, False, False],
    ]


def test_hits_count_the_likeliest_id_per_slot() -> None:
    head = torch.eye(4)
    hidden = torch.zeros(2, 3, 4)
    hidden[0, 1, 2] = hidden[0, 2, 3] = hidden[1, 1, 0] = 5.0
    targets = slot_targets(
        torch.tensor([1, 2, 3, 1, 2]), torch.ones(5, dtype=torch.bool), torch.zeros(5).long(), torch.tensor([0, 3]), 3
    )
    sums = block_loss(hidden, head, targets, LossOptions())
    assert sums.hits_L.tolist() == [1, 1]
    assert sums.counts_L.tolist() == [2, 1]


def test_values_of_slots_that_do_not_count_change_nothing() -> None:
    hidden, head, _, targets = batch(5, 6, 5)
    hidden.requires_grad_()
    sums = block_loss(hidden, head, targets, LossOptions())
    sums.numerator.backward()
    assert hidden.grad is not None
    assert not hidden.grad[:, 1:][~targets.counts_NL].any()
    assert not hidden.grad[:, 0].any()
    assert hidden.grad[:, 1:][targets.counts_NL].abs().sum(-1).all()


@given(st.lists(st.floats(0, 20), min_size=4, max_size=4), st.floats(0.05, 1.0))
def test_d_pace_weights_never_grow_along_the_block_and_stay_within_its_length(nll: list[float], alpha: float) -> None:
    options = LossOptions(weighting="d_pace", alpha=alpha)
    weights = slot_weights(torch.tensor([nll]), torch.ones(1, 4, dtype=torch.bool), options)[0].tolist()
    assert all(later <= earlier for earlier, later in pairwise(weights))
    assert 0 < weights[-1] <= weights[0] <= 4.0001
    if alpha == 1.0:
        assert weights == [4, 3, 2, 1]


def test_kl_without_a_teacher_is_refused() -> None:
    hidden, head, _, targets = batch(0, 2, 3)
    with pytest.raises(UsageError, match="final states"):
        block_loss(hidden, head, targets, LossOptions(objective="kl"))


def test_a_block_without_any_counted_slot_gives_zero() -> None:
    hidden, head, _, targets = batch(0, 2, 3)
    nothing = SlotTargets(targets.label_NL, torch.zeros_like(targets.counts_NL), targets.teacher_row_NL)
    sums = block_loss(hidden.requires_grad_(), head, nothing, LossOptions())
    assert sums.numerator.item() == sums.weight.item() == 0
