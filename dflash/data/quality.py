"""The quality gate: rules over the whole batch, from the shards' indexes alone, before anything is published.

A row is *confirmed* when something that doesn't come from our own rendering agrees with its mask: the server counted
as many `output_tokens` (or as many as the untrimmed text has), or the record carried the sampled ids. Equal and tiny
counts are alarming only in rows that aren't: completions capped at 128 tokens rightly have 128 each, one-word answers
rightly have 2, but the scaffold that was left of lost answers (6 tokens each) is confirmed by nothing.

A share fails when it is above its limit and at least two rows stand behind it (unless the limit is 0), so that a
trial with ten records isn't stopped by a single odd one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.config import GateThresholds
from dflash.data.batch_columns import BatchColumns, BoolArray, IntArray, read_columns
from dflash.data.mix import mix_of, mix_shift
from dflash.data.quality_report import (
    Baseline,
    Distribution,
    Finding,
    LossCount,
    QualityReport,
    RowCounts,
    printable,
)
from dflash.data.quality_rules import make_finding, rounded, share_finding
from dflash.data.rows import RowFlag
from dflash.errors import GateError
from dflash.manifest import canonical_json

TOP_LOSS_COUNTS: Final = 10
MIN_LOSS_TOKENS: Final = 2  # one anchor and one token to predict
# Among 60 rows with lengths spread over 300 values, five agree by chance once in 1,400 batches.
MIN_EQUAL_ROWS: Final = 5

# Half octaves: 1, 2, 3, 4, 6, 8, 11, 16, ... 1,048,576.
COUNT_EDGES: Final = (0.0, *sorted({float(round(2 ** (step / 2))) for step in range(41)}))
# Steps of 0.04, so that the middle bin is what agrees: 0.98 to 1.02.
RATIO_EDGES: Final = (0.0, *((2 + 4 * step) / 100 for step in range(51)))


def assess(
    indexes: Iterable[pa.Table],
    *,
    reject_reasons: Mapping[str, int],
    num_records: int,
    thresholds: GateThresholds,
    baseline: Baseline | None = None,
    reject_examples: Mapping[str, Sequence[str]] | None = None,
) -> QualityReport:
    """Apply every rule to a batch.

    Args:
        indexes: the index of each shard (`INDEX_SCHEMA`), in shard order.
        reject_reasons: rejected records by reason code.
        num_records: records read, good and rejected.
        thresholds: the limits.
        baseline: the mix of the version that the batch will be merged into.
        reject_examples: ids or file:line of some rejected records by reason code.

    Returns:
        The report; it depends on the rows and their order alone.

    Raises:
        DatasetError: an index has another schema.
    """
    columns = read_columns(indexes)
    num_rejected = sum(reject_reasons.values())
    num_records = max(num_records, columns.num_rows + num_rejected)
    mix = Baseline(sources=mix_of(columns.sources), scripts=mix_of(columns.scripts))
    checks = _Checks(columns, thresholds)
    findings = (
        *checks.rows(),
        *checks.rejected(_Rejects(num_records, reject_reasons, reject_examples or {})),
        *_mix_findings(mix, baseline, thresholds),
    )
    apart = columns.known & columns.window_cut
    return QualityReport(
        passed=all(finding.passed for finding in findings),
        num_records=num_records,
        num_rows=columns.num_rows,
        num_rejected=num_rejected,
        num_tokens=int(columns.lengths.sum()),
        num_loss_tokens=int(columns.loss.sum()),
        rows=_row_counts(columns),
        lengths=_distribution(columns.lengths, COUNT_EDGES),
        loss_tokens=_distribution(columns.loss, COUNT_EDGES),
        ratio=_distribution(columns.ratio[columns.comparable], RATIO_EDGES),
        window_cut_ratio=_distribution(columns.ratio[apart], RATIO_EDGES),
        top_loss_counts=_top_loss_counts(columns),
        reject_reasons=dict(sorted(reject_reasons.items())),
        mix=mix,
        baseline=baseline,
        findings=findings,
        thresholds=thresholds,
    )


def enforce(report: QualityReport, thresholds: GateThresholds) -> str | None:
    """Stop a batch that failed.

    Returns:
        The reason for which a failed batch is let through, to be recorded; `None` where the batch passed.

    Raises:
        GateError: the batch failed and no override is given; names each failed rule, what to look at and examples.
    """
    if report.passed:
        return None
    if thresholds.override_reason is not None:
        return thresholds.override_reason
    failures = report.failures
    lines = [
        (
            f"The quality gate stopped the batch: {len(failures)} of {len(report.findings)} rules failed. Nothing was "
            f"published. Rows: {report.num_rows:,}; records rejected: {report.num_rejected:,}."
        ),
    ]
    for finding in failures:
        lines.append(f"  {finding.rule}: {finding.title}: found {finding.value_text}, allowed {finding.limit_text}.")
        lines.append(f"    {finding.meaning}")
        lines.append(f"    Look at: {finding.look_at}")
        if finding.examples:
            lines.append(f"    Examples: {', '.join(printable(name) for name in finding.examples)}")
    lines.append("Repair the batch, or set gate.override_reason to a reason that will be kept in the manifest.")
    raise GateError("\n".join(lines))


def baseline_of(quality: Mapping[str, Any]) -> Baseline | None:
    """The mix of a version by its manifest's quality report: its batch and what the batch was merged into.

    None where the version has no report, such as an adopted one.

    Raises:
        DatasetError: the report is damaged.
    """
    if not quality.get("mix"):
        return None
    report = QualityReport.from_bytes(canonical_json(quality), "The quality report in the current version's manifest")
    return report.mix if report.baseline is None else report.mix.plus(report.baseline)


@dataclass(frozen=True, slots=True)
class _Rejects:
    num_records: int
    by_reason: Mapping[str, int]
    examples: Mapping[str, Sequence[str]]

    def named(self, reasons: Iterable[str]) -> list[str]:
        return [name for reason in sorted(reasons) for name in self.examples.get(reason, ())]


class _Checks:
    """The rules over rows; each method makes one finding."""

    def __init__(self, columns: BatchColumns, thresholds: GateThresholds) -> None:
        self._columns = columns
        self._limits = thresholds

    def rows(self) -> Iterable[Finding]:
        """Every rule about rows, in the order of the report."""
        columns, limits = self._columns, self._limits
        count = columns.num_rows
        yield make_finding("min_rows", float(count), count, passed=count >= limits.min_rows, at_least=limits.min_rows)
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
        yield self._duplicates("duplicate_ids", columns.ids)
        yield self._duplicates("duplicate_content", columns.hashes)

    def share(self, rule: str, rows: BoolArray, limit: float) -> Finding:
        """A share of all rows."""
        return share_finding(rule, int(rows.sum()), len(rows), limit, self._columns.examples(rows))

    def rejected(self, rejects: _Rejects) -> Iterable[Finding]:
        """Every rule about records that never became a row."""
        limits, total, reasons = self._limits, rejects.num_records, sorted(rejects.by_reason)
        rows = self._columns.loss < MIN_LOSS_TOKENS
        empty = [reason for reason in reasons if "empty" in reason]
        count = int(rows.sum()) + sum(rejects.by_reason[reason] for reason in empty)
        examples = (*self._columns.examples(rows), *rejects.named(empty))
        yield share_finding("empty", count, total, limits.max_reject_reason_share, examples)
        count = sum(rejects.by_reason.values())
        yield share_finding("rejected", count, total, limits.max_reject_share, rejects.named(reasons))
        for reason in reasons:
            count, examples = rejects.by_reason[reason], tuple(rejects.named([reason]))
            finding = share_finding("rejected_reason", count, total, limits.max_reject_reason_share, examples)
            title = finding.title.format(reason=printable(reason))
            yield finding.model_copy(update={"rule": f"rejected:{reason}", "title": title})

    def _single_loss_count(self) -> Finding:
        columns = self._columns
        suspects = _unexplained_counts(columns)
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
            at_least=limits.min_median_ratio,
            at_most=limits.max_median_ratio,
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

    def _duplicates(self, rule: str, column: pa.ChunkedArray) -> Finding:
        limit = self._limits.max_duplicate_share
        codes = [chunk.indices.to_numpy() for chunk in column.dictionary_encode().chunks]
        code = np.concatenate(codes) if codes else np.empty(0, np.int32)
        first = np.zeros(len(code), dtype=np.bool_)
        first[np.unique(code, return_index=True)[1]] = True
        return self.share(rule, ~first, limit)


def _unexplained_counts(columns: BatchColumns) -> BoolArray:
    """Rows whose number of loss tokens should be nobody else's.

    Not those that are confirmed, nor those that a limit gave their size: the window, or (without `output_tokens` to
    confirm it) the server's max_tokens, which is the largest count among the rows that it cut.
    """
    cut = columns.has(RowFlag.LENGTH_CUT) & ~columns.known
    capped = cut & (columns.loss == columns.loss[cut].max()) if cut.any() else cut
    return ~columns.confirmed & ~columns.window_cut & ~capped


def _mix_findings(mix: Baseline, baseline: Baseline | None, limits: GateThresholds) -> Iterable[Finding]:
    old = baseline or Baseline(sources={}, scripts={})
    pairs = (
        ("source_mix", mix.sources, old.sources, limits.max_source_shift),
        ("script_mix", mix.scripts, old.scripts, limits.max_script_shift),
    )
    for rule, new_mix, old_mix, limit in pairs:
        shift = mix_shift(new_mix, old_mix)
        yield make_finding(rule, shift, sum(new_mix.values()), passed=shift is None or shift <= limit, at_most=limit)


def _row_counts(columns: BatchColumns) -> RowCounts:
    return RowCounts(
        with_output_tokens=int(columns.known.sum()),
        equal_output_tokens=int((columns.known & (columns.loss == columns.output)).sum()),
        sampled_ids=int(columns.has(RowFlag.SAMPLED_IDS).sum()),
        confirmed=int(columns.confirmed.sum()),
        length_cut=int(columns.has(RowFlag.LENGTH_CUT).sum()),
        window_cut=int(columns.window_cut.sum()),
        thinking_only=int(columns.has(RowFlag.THINKING_ONLY).sum()),
        undecodable=int(columns.has(RowFlag.UNDECODABLE).sum()),
        verbatim_whitespace=int(columns.has(RowFlag.VERBATIM_WHITESPACE).sum()),
    )


def _top_loss_counts(columns: BatchColumns) -> tuple[LossCount, ...]:
    values, counts = np.unique(columns.loss, return_counts=True)
    suspects = _unexplained_counts(columns)
    largest = np.lexsort((values, -counts))[:TOP_LOSS_COUNTS]
    return tuple(
        LossCount(
            num_loss_tokens=int(values[place]),
            num_rows=int(counts[place]),
            num_unexplained=int((suspects & (columns.loss == values[place])).sum()),
        )
        for place in largest
    )


def _distribution(values: npt.NDArray[np.float64] | IntArray, edges: Sequence[float]) -> Distribution:
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
