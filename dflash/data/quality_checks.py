"""The arithmetic of the quality gate's rules: which rows and records each counts, and against which limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dflash.config import GateThresholds
from dflash.data.batch_columns import BatchColumns, BoolArray
from dflash.data.mix import mix_shift
from dflash.data.quality_report import Baseline, Finding, printable
from dflash.data.quality_rules import make_finding, rounded, share_finding
from dflash.data.records import Reason
from dflash.data.rows import RowFlag

MIN_LOSS_TOKENS: Final = 2  # one anchor and one token to predict
# Among 60 rows with lengths spread over 300 values, five agree by chance once in 1,400 batches.
MIN_EQUAL_ROWS: Final = 5
# One reject of these stands for the rest of a file, which may be most of a batch: a share of records can't see it.
FILE_REASONS: Final = (Reason.TRUNCATED_FILE, Reason.CORRUPT_STREAM, Reason.FILE_TOO_LARGE)


@dataclass(frozen=True, slots=True)
class Rejects:
    """Records that never became a row.

    Attributes:
        num_records: records read, good and rejected.
        by_reason: rejects by reason code.
        examples: ids or file:line of some rejects by reason code.
    """

    num_records: int
    by_reason: Mapping[str, int]
    examples: Mapping[str, Sequence[str]]

    @property
    def num_rejected(self) -> int:
        """Rejects of every reason together."""
        return sum(self.by_reason.values())

    def count(self, reasons: Iterable[str]) -> int:
        """Rejects of these reasons together."""
        return sum(self.by_reason.get(reason, 0) for reason in reasons)

    def named(self, reasons: Iterable[str]) -> list[str]:
        """Examples of these reasons, one reason after another."""
        return [name for reason in sorted(reasons) for name in self.examples.get(reason, ())]


class Checks:
    """The rules over rows and rejects; each method makes the findings of one or several."""

    def __init__(self, columns: BatchColumns, thresholds: GateThresholds) -> None:
        self._columns = columns
        self._limits = thresholds

    def rows(self) -> Iterable[Finding]:
        """Every rule about rows, in the order of the report."""
        columns, limits = self._columns, self._limits
        count = columns.num_rows
        yield make_finding(
            "min_rows", float(count), count, passed=count >= limits.min_rows, allowed=(limits.min_rows, None)
        )
        yield self._single_loss_count()
        tiny = (columns.loss <= limits.tiny_mask_tokens) & ~columns.confirmed
        yield self.share("tiny_mask", tiny, limits.max_tiny_mask_share)
        yield self._median_ratio()
        yield self._ratio_mismatch()
        yield self.share("length_cut", columns.has(RowFlag.LENGTH_CUT), limits.max_length_cut_share)
        yield self.share("window_cut", columns.window_cut, limits.max_window_cut_share)
        # A completion that was cut while it was thinking is already counted as cut.
        thinking_only = columns.has(RowFlag.THINKING_ONLY) & ~columns.has(RowFlag.LENGTH_CUT) & ~columns.window_cut
        yield self.share("thinking_only", thinking_only, limits.max_thinking_only_share)
        yield self.share("undecodable", columns.has(RowFlag.UNDECODABLE), limits.max_undecodable_share)
        yield self.share("duplicate_ids", columns.repeated("sample_id"), limits.max_duplicate_share)
        yield self.share("duplicate_content", columns.repeated("content_hash"), limits.max_duplicate_share)

    def share(self, rule: str, rows: BoolArray, limit: float) -> Finding:
        """A share of all rows."""
        return share_finding(rule, int(rows.sum()), len(rows), limit, self._columns.examples(rows))

    def rejected(self, rejects: Rejects) -> Iterable[Finding]:
        """Every rule about records that never became a row."""
        limits, total, reasons = self._limits, rejects.num_records, sorted(rejects.by_reason)
        rows = self._columns.loss < MIN_LOSS_TOKENS
        empty = [reason for reason in reasons if "empty" in reason]
        count = int(rows.sum()) + rejects.count(empty)
        examples = (*self._columns.examples(rows), *rejects.named(empty))
        yield share_finding("empty", count, total, limits.max_reject_reason_share, examples)
        yield self._damaged_files(rejects)
        yield share_finding("rejected", rejects.num_rejected, total, limits.max_reject_share, rejects.named(reasons))
        for reason in reasons:
            count, examples = rejects.by_reason[reason], tuple(rejects.named([reason]))
            finding = share_finding("rejected_reason", count, total, limits.max_reject_reason_share, examples)
            title = finding.title.format(reason=printable(reason))
            yield finding.model_copy(update={"rule": f"rejected:{reason}", "title": title})

    def _damaged_files(self, rejects: Rejects) -> Finding:
        count, limit = rejects.count(FILE_REASONS), self._limits.max_damaged_files
        return make_finding(
            "damaged_files",
            float(count),
            count,
            passed=count <= limit,
            allowed=(None, limit),
            examples=rejects.named(FILE_REASONS),
        )

    def _single_loss_count(self) -> Finding:
        columns = self._columns
        suspects = unexplained_counts(columns)
        values, counts = np.unique(columns.loss[suspects], return_counts=True)
        limit = self._limits.max_single_loss_count_share
        if len(values) == 0:
            return share_finding("single_loss_count", 0, columns.num_rows, limit, ())
        value, count = int(values[counts.argmax()]), int(counts.max())
        finding = share_finding(
            "single_loss_count",
            count,
            columns.num_rows,
            limit,
            columns.examples(suspects & (columns.loss == value)) if count >= MIN_EQUAL_ROWS else (),
            min_count=MIN_EQUAL_ROWS,
        )
        return finding.model_copy(update={"title": f"{finding.title} (most often {value:,})"})

    def _median_ratio(self) -> Finding:
        columns, limits = self._columns, self._limits
        rows = columns.comparable
        median = rounded(np.median(columns.ratio[rows])) if rows.any() else None
        passed = median is None or limits.min_median_ratio <= median <= limits.max_median_ratio
        outside = rows & ((columns.ratio < limits.min_median_ratio) | (columns.ratio > limits.max_median_ratio))
        return make_finding(
            "median_ratio",
            median,
            int(rows.sum()),
            passed=passed,
            allowed=(limits.min_median_ratio, limits.max_median_ratio),
            examples=() if passed else columns.examples(outside),
        )

    def _ratio_mismatch(self) -> Finding:
        """Share of the rows that can be compared, so that a batch with few counts is judged by them."""
        columns, limits = self._columns, self._limits
        rows = columns.comparable & ~columns.has(RowFlag.VERBATIM_WHITESPACE)
        off = rows & (np.abs(columns.ratio - 1) > limits.ratio_tolerance)
        limit = limits.max_ratio_mismatch_share
        return share_finding(
            "ratio_mismatch", int(off.sum()), int(columns.comparable.sum()), limit, columns.examples(off)
        )


def mix_findings(mix: Baseline, baseline: Baseline | None, limits: GateThresholds) -> Iterable[Finding]:
    """The rules about how far the batch's mix lies from that of the current version."""
    old = baseline or Baseline(sources={}, scripts={})
    pairs = (
        ("source_mix", mix.sources, old.sources, limits.max_source_shift),
        ("script_mix", mix.scripts, old.scripts, limits.max_script_shift),
    )
    for rule, new_mix, old_mix, limit in pairs:
        shift = mix_shift(new_mix, old_mix)
        yield make_finding(
            rule, shift, sum(new_mix.values()), passed=shift is None or shift <= limit, allowed=(None, limit)
        )


def unexplained_counts(columns: BatchColumns) -> BoolArray:
    """Rows whose number of loss tokens should be nobody else's.

    Not those that are confirmed, nor those that a limit gave their size: the window, or (without `output_tokens` to
    confirm it) the server's max_tokens, which is the largest count among the rows that it cut.
    """
    cut = columns.has(RowFlag.LENGTH_CUT) & ~columns.known
    capped = cut & (columns.loss == columns.loss[cut].max()) if cut.any() else cut
    return ~columns.confirmed & ~columns.window_cut & ~capped
