from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import torch

from dflash.data.batches import LocalShards
from dflash.train.loss import SlotTargets
from dflash.train.vocabulary import DraftVocabulary, commonest_ids


def test_the_commonest_written_ids_are_chosen(tmp_path: Path) -> None:
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
    assert commonest_ids(source, 12, 3) == [2, 4, 7]
    assert commonest_ids(source, 12, 5) == [0, 1, 2, 4, 7]


def test_labels_are_renumbered_and_rare_ones_do_not_count() -> None:
    vocabulary = DraftVocabulary.of([7, 2, 4], 12, torch.device("cpu"))
    labels = torch.tensor([[2, 4, 5], [7, 0, 2]])
    counts = torch.tensor([[True, True, True], [True, True, False]])
    renumbered = vocabulary.renumber(SlotTargets(labels, counts, labels))
    assert renumbered.counts_NL.tolist() == [[True, True, False], [True, False, False]]
    assert renumbered.label_NL[renumbered.counts_NL].tolist() == [0, 1, 2]
    head = torch.arange(24.0).view(12, 2)
    assert torch.equal(vocabulary.head(head), head[[2, 4, 7]])
