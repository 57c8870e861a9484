from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dflash.data.batches import LocalShards
from dflash.train.loss import SlotTargets, block_loss
from dflash.train.loss_options import LossOptions
from dflash.train.vocabulary import LossVocabulary, count_written_ids


def test_written_ids_are_counted(tmp_path: Path) -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[9, 9, 9, 4, 4, 2], [4, 7, 7, 2]], pa.list_(pa.int32())),
            "loss_mask": [[False] * 3 + [True] * 3, [True] * 4],
            "sample_id": ["a", "b"],
            "source": ["", ""],
        }
    )
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    source = LocalShards.scan([tmp_path / "s.arrow"])
    counts = np.zeros(12, dtype=np.int64)
    counts[[2, 4, 7]] = 2, 3, 2
    assert count_written_ids(source, 12).tolist() == counts.tolist()


def sampled(size: int, labels: torch.Tensor, counts: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The head of 40 ids, of which 2, 4 and 7 are the commonest, and a sample for `labels`."""
    counts_V = np.zeros(40, dtype=np.int64)
    counts_V[[2, 4, 7]] = 5, 9, 7
    head = torch.randn(40, 3, generator=torch.Generator().manual_seed(5))
    vocabulary = LossVocabulary.of(counts_V, size, head)
    part, offset, targets = vocabulary.sample(
        head, SlotTargets(labels, counts, labels), torch.Generator().manual_seed(seed)
    )
    return head, part, offset, targets.label_NL, targets.counts_NL


def test_a_sample_holds_the_commonest_ids_the_labels_and_stands_for_all_others() -> None:
    labels = torch.tensor([[2, 4, 33], [7, 20, 2]])
    counts = torch.tensor([[True, True, True], [True, False, True]])
    head, part, offset, places, counts_after = sampled(16, labels, counts)
    assert torch.equal(counts_after, counts)
    assert torch.equal(part[places[counts]], head[labels[counts]])
    assert torch.equal(part[:14], head[[*range(13), *range(13, 14)]])
    # 14 common ids, the label 33 and 1 or 2 drawn ids, which stand for the 25 others.
    num_drawn = len(part) - 15
    assert num_drawn in {1, 2}
    assert offset.tolist() == [0.0] * 15 + [offset[-1].item()] * num_drawn
    assert math.isclose(offset[-1].item(), math.log(25 / num_drawn), rel_tol=1e-6)


def test_the_sampled_loss_is_the_whole_loss_on_average() -> None:
    labels, counts = torch.tensor([[4, 30]]), torch.tensor([[True, True]])
    hidden = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(1)) * 0.3
    values = []
    for seed in range(600):
        head, part, offset, places, _ = sampled(24, labels, counts, seed)
        targets = SlotTargets(places, counts, places)
        values.append(float(block_loss(hidden, part, targets, LossOptions(), offset_V=offset).numerator))
    whole = float(block_loss(hidden, head, SlotTargets(labels, counts, labels), LossOptions()).numerator)
    assert abs(np.mean(values) - whole) < 0.02 * whole


def test_a_sample_of_nearly_all_ids_is_the_whole_loss() -> None:
    labels, counts = torch.tensor([[4, 30]]), torch.tensor([[True, True]])
    hidden = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(1))
    counts_V = np.zeros(9, dtype=np.int64)
    head = torch.randn(9, 3, generator=torch.Generator().manual_seed(5))
    vocabulary = LossVocabulary.of(counts_V, 8, head)
    labels = torch.tensor([[0, 8]])
    part, offset, targets = vocabulary.sample(
        head, SlotTargets(labels, counts, labels), torch.Generator().manual_seed(0)
    )
    found = block_loss(hidden, part, targets, LossOptions(), offset_V=offset)
    whole = block_loss(hidden, head, SlotTargets(labels, counts, labels), LossOptions())
    torch.testing.assert_close(found.numerator, whole.numerator)
