from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.train.anchors import eligible, sample_anchors


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=40),
    n=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_anchors_are_response_tokens_followed_by_one_of_the_same_document(
    tokens: list[tuple[bool, int]], n: int, seed: int
) -> None:
    mask = torch.tensor([written for written, _ in tokens])
    document = torch.tensor([number for _, number in tokens]).sort().values
    expected = {at for at in range(len(tokens) - 1) if mask[at] and mask[at + 1] and document[at] == document[at + 1]}
    assert set(eligible(mask, document).nonzero().flatten().tolist()) == expected
    anchors = sample_anchors(mask, document, n, torch.Generator().manual_seed(seed)).tolist()
    assert len(anchors) == len(set(anchors)) == min(n, len(expected))
    assert set(anchors) <= expected
    assert anchors == sorted(anchors)


def test_the_generator_decides() -> None:
    mask, document = torch.ones(200, dtype=torch.bool), torch.zeros(200, dtype=torch.int64)
    draws = [sample_anchors(mask, document, 10, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_every_eligible_token_is_drawn_about_equally_often() -> None:
    mask, document = torch.ones(21, dtype=torch.bool), torch.zeros(21, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(21)
    for _ in range(2000):
        counts[sample_anchors(mask, document, 5, generator)] += 1
    assert counts[20] == 0
    assert 400 < counts[:20].min() <= counts[:20].max() < 600
