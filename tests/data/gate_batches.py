"""Indexes of whole batches for the tests of the quality gate, and the gate's answer in short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dflash.config import GateThresholds
from dflash.data.quality import assess
from dflash.data.quality_report import Finding, QualityReport
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA

LIMITS = GateThresholds()


def make_index(loss: Any, output: Any = "same", *, all_turns: bool = False, **columns: Any) -> pa.Table:
    """An index whose rows are sound unless a column says otherwise.

    Rows are flagged as tokenizing one turn would flag them; `all_turns` rows hold loss tokens of earlier turns too, and
    the last turn of each is as long as `output`.
    """
    loss = np.asarray(loss, np.int32)
    count = len(loss)
    start = columns.pop("start", 0)
    given_output = loss if isinstance(output, str) else output
    flags = np.asarray(columns.pop("flags", np.zeros(count)), np.uint16)
    if given_output is not None and not all_turns:
        differs = [known is not None and known != own for known, own in zip(given_output, loss, strict=True)]
        uncut = (flags & RowFlag.WINDOW_CUT) == 0  # compared before the window's cut
        flags = np.where(differs & uncut, flags | RowFlag.OUTPUT_MISMATCH, flags).astype(np.uint16)
    values = {
        "sample_id": [f"id-{start + row}" for row in range(count)],
        "source": ["chat"] * count,
        "content_hash": [(start + row).to_bytes(16, "big") for row in range(count)],
        "num_tokens": loss + 40,
        "num_loss_tokens": loss,
        "output_tokens": [None] * count if given_output is None else given_output,
        "finish_reason": ["stop"] * count,
        "flags": flags,
        "script": ["latin"] * count,
    } | columns
    arrays = [pa.array(values[field.name], field.type) for field in INDEX_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def judge(*indexes: pa.Table, limits: GateThresholds = LIMITS, **options: Any) -> QualityReport:
    given: dict[str, Any] = {"reject_reasons": {}, "num_records": 0} | options
    return assess(indexes, thresholds=limits, **given)


def failed(report: QualityReport) -> set[str]:
    return {finding.rule for finding in report.failures}


def finding(report: QualityReport, rule: str) -> Finding:
    return next(item for item in report.findings if item.rule == rule)


def lengths(count: int, low: int = 200, high: int = 900, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int32)


def incident(count: int = 1000, share: float = 0.87) -> tuple[np.ndarray, np.ndarray]:
    """Lost answers: the mask covers six tokens of scaffold, while the server sampled hundreds."""
    output = lengths(count)
    loss = output.copy()
    loss[: int(count * share)] = 6
    order = np.random.default_rng(3).permutation(count)
    return loss[order], output[order]
