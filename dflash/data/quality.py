"""The quality gate: rules over the whole batch, from the shards' indexes alone, before anything is published.

A row is *confirmed* when something that doesn't come from our own rendering agrees with its mask: the server counted
as many `output_tokens` (or as many as the untrimmed text has), or the record carried the sampled ids. Equal and tiny
counts are alarming only in rows that aren't: completions capped at 128 tokens rightly have 128 each, one-word answers
rightly have 2, but the scaffold that was left of lost answers (6 tokens each) is confirmed by nothing.

With `loss_on="all_turns"` a mask holds more than the last response, which alone `output_tokens` counts. Whether the two
agree was found when the row was tokenized (`RowFlag.OUTPUT_MISMATCH`); the gate takes that, and never counts again.

A share fails when it is above its limit and at least two rows stand behind it (unless the limit is 0), so that a
trial with ten records isn't stopped by a single odd one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dflash.config import GateThresholds
from dflash.data.batch_columns import BatchColumns, read_columns
from dflash.data.mix import mix_of_tables
from dflash.data.quality_checks import Checks, Rejects, mix_findings
from dflash.data.quality_numbers import COUNT_EDGES, RATIO_EDGES, count_rows, distribution, top_loss_counts
from dflash.data.quality_report import Baseline, Finding, QualityReport, printable
from dflash.errors import GateError
from dflash.manifest import canonical_json


def assess(
    indexes: Sequence[pa.Table],
    *,
    reject_reasons: Mapping[str, int],
    num_records: int,
    thresholds: GateThresholds,
    baseline: Baseline | None = None,
    reject_examples: Mapping[str, Sequence[str]] | None = None,
) -> QualityReport:
    """Apply every rule to a batch.

    Args:
        indexes: the index of each shard (`INDEX_SCHEMA`), in shard order; each is asked for several times, so that a
            sequence that reads them from files keeps one in memory.
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
    num_read = max(num_records, columns.num_rows + sum(reject_reasons.values()))
    rejects = Rejects(num_read, reject_reasons, reject_examples or {})
    checks = Checks(columns, thresholds)
    mix = Baseline(sources=mix_of_tables(indexes, "source"), scripts=mix_of_tables(indexes, "script"))
    findings = (*checks.rows(), *checks.rejected(rejects), *mix_findings(mix, baseline, thresholds))
    return _describe(columns, rejects, findings, mix, thresholds, baseline)


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


def _describe(
    columns: BatchColumns,
    rejects: Rejects,
    findings: tuple[Finding, ...],
    mix: Baseline,
    thresholds: GateThresholds,
    baseline: Baseline | None,
) -> QualityReport:
    return QualityReport(
        passed=all(finding.passed for finding in findings),
        num_records=rejects.num_records,
        num_rows=columns.num_rows,
        num_rejected=rejects.num_rejected,
        num_tokens=int(columns.lengths.sum()),
        num_loss_tokens=int(columns.loss.sum()),
        rows=count_rows(columns),
        lengths=distribution(columns.lengths, COUNT_EDGES),
        loss_tokens=distribution(columns.loss, COUNT_EDGES),
        ratio=distribution(columns.ratio[columns.comparable], RATIO_EDGES),
        window_cut_ratio=distribution(columns.ratio[columns.known & columns.window_cut], RATIO_EDGES),
        top_loss_counts=top_loss_counts(columns),
        reject_reasons=dict(sorted(rejects.by_reason.items())),
        mix=mix,
        baseline=baseline,
        findings=findings,
        thresholds=thresholds,
    )
