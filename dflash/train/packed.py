"""A pack of rows as the tensors that target and drafter take.

Legend: S tokens of the packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.data.batches import Pack
from dflash.data.row_reader import Row


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Documents one behind the other, on the CPU.

    Attributes:
        ids_S: int64.
        loss_mask_S: bool.
        position_S: int64, position in its own document.
        document_S: int64, number of its document.
    """

    ids_S: Tensor
    loss_mask_S: Tensor
    position_S: Tensor
    document_S: Tensor

    @classmethod
    def of(cls, rows: tuple[Row, ...]) -> PackedRow:
        """Lay rows out one behind the other."""
        lengths = np.array([len(row.input_ids) for row in rows])
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(
            torch.from_numpy(np.concatenate([row.input_ids for row in rows]).astype(np.int64)),
            torch.from_numpy(np.concatenate([row.loss_mask for row in rows])),
            torch.from_numpy(np.arange(lengths.sum()) - starts),
            torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        )


def row_slices(pack: Pack) -> list[slice]:
    """Return where each row of a pack lies in its packed row."""
    ends = np.cumsum([len(row.input_ids) for row in pack.rows]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
