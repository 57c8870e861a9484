"""The numbers of a batch that the quality report shows beside its findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dflash.data.batch_columns import BatchColumns, CountArray
from dflash.data.quality_checks import unexplained_counts
from dflash.data.quality_report import Distribution, LossCount, RowCounts
from dflash.data.quality_rules import rounded
from dflash.data.rows import RowFlag

TOP_LOSS_COUNTS: Final = 10

# Half octaves: 1, 2, 3, 4, 6, 8, 11, 16, ... 1,048,576.
COUNT_EDGES: Final = (0.0, *sorted({float(round(2 ** (step / 2))) for step in range(41)}))
# Steps of 0.04, so that the middle bin is what agrees: 0.98 to 1.02.
RATIO_EDGES: Final = (0.0, *((2 + 4 * step) / 100 for step in range(51)))


def count_rows(columns: BatchColumns) -> RowCounts:
    """Rows by what is known about them."""
    return RowCounts(
        with_output_tokens=int(columns.known.sum()),
        equal_output_tokens=int(columns.agrees.sum()),
        sampled_ids=int(columns.has(RowFlag.SAMPLED_IDS).sum()),
        confirmed=int(columns.confirmed.sum()),
        length_cut=int(columns.has(RowFlag.LENGTH_CUT).sum()),
        window_cut=int(columns.window_cut.sum()),
        thinking_only=int(columns.has(RowFlag.THINKING_ONLY).sum()),
        undecodable=int(columns.has(RowFlag.UNDECODABLE).sum()),
        verbatim_whitespace=int(columns.has(RowFlag.VERBATIM_WHITESPACE).sum()),
    )


def top_loss_counts(columns: BatchColumns) -> tuple[LossCount, ...]:
    """The commonest numbers of loss tokens, the commonest first."""
    values, counts = np.unique(columns.loss, return_counts=True)
    suspects = unexplained_counts(columns)
    largest = np.lexsort((values, -counts))[:TOP_LOSS_COUNTS]
    return tuple(
        LossCount(
            num_loss_tokens=int(values[place]),
            num_rows=int(counts[place]),
            num_unexplained=int((suspects & (columns.loss == values[place])).sum()),
        )
        for place in largest
    )


def distribution(values: npt.NDArray[np.float64] | CountArray, edges: Sequence[float]) -> Distribution:
    """Bins and percentiles of one number of every row; values [n]."""
    bins = np.histogram(np.clip(values, edges[0], np.nextafter(edges[-1], 0)), np.array(edges))[0]
    some = len(values) > 0
    points = [rounded(value) for value in np.percentile(values, [0, 1, 50, 99, 100])] if some else [None] * 5
    return Distribution(
        edges=tuple(edges),
        bins=tuple(int(count) for count in bins),
        num_rows=len(values),
        mean=rounded(values.mean()) if some else None,
        low=points[0],
        p1=points[1],
        median=points[2],
        p99=points[3],
        high=points[4],
    )
