"""What the quality gate found, as a contract: stored in the manifest, shown in artifacts, compared with the next batch.

Nothing here holds a token or a text of a sample: counts, fixed histograms and up to ten ids a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config import GateThresholds
from dflash.manifest import Contract

Unit = Literal["share", "ratio", "rows", "files", "distance"]


class Baseline(Contract):
    """How many rows of a version or a batch have which source and which script."""

    sources: dict[str, int]
    scripts: dict[str, int]

    def plus(self, other: Baseline) -> Baseline:
        """The mix of both together, such as a version and the batch merged into it."""
        return Baseline(sources=_add(self.sources, other.sources), scripts=_add(self.scripts, other.scripts))


class Distribution(Contract):
    """One number of every row: fixed bins and percentiles; all `None` where no row has it.

    Bin i holds edges[i] <= value < edges[i + 1]; the first and last bins also hold what lies outside.
    """

    edges: tuple[float, ...]
    bins: tuple[int, ...]
    num_rows: int
    mean: float | None
    low: float | None
    p1: float | None
    median: float | None
    p99: float | None
    high: float | None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.edges) != len(self.bins) + 1 or sum(self.bins) != self.num_rows:
            raise ValueError("a distribution needs one edge more than bins, and bins that sum to its rows")
        return self


class LossCount(Contract):
    """How many rows have exactly `num_loss_tokens`, and how many of them nothing explains."""

    num_loss_tokens: int
    num_rows: int
    num_unexplained: int


class RowCounts(Contract):
    """Rows by what is known about them; one row may count several times.

    `equal_output_tokens` rows have a mask whose last response has exactly as many tokens as the server counted;
    `confirmed` are these and those whose mask comes from the sampled ids or whose untrimmed text fits the count.
    """

    with_output_tokens: int
    equal_output_tokens: int
    sampled_ids: int
    confirmed: int
    length_cut: int
    window_cut: int
    thinking_only: int
    undecodable: int
    verbatim_whitespace: int


class Finding(Contract):
    """One rule applied to the batch.

    Attributes:
        rule: stable name; a reject reason's is `rejected:<reason>`.
        value: what was measured, in `unit`; `None` where there was nothing to measure.
        at_least: lowest value that passes.
        at_most: highest value that passes.
        count: rows or records behind the value.
        meaning: what the value says.
        look_at: where the cause usually is, and what to do.
        examples: up to ten sample ids (or file:line of rejected records).
    """

    rule: str
    title: str
    unit: Unit
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    count: int
    passed: bool
    meaning: str
    look_at: str
    examples: tuple[str, ...] = ()

    @property
    def value_text(self) -> str:
        """The value for people, such as `87.00 %`."""
        return format_value(self.value, self.unit)

    @property
    def limit_text(self) -> str:
        """The limits for people, such as `at most 5.00 %`."""
        limits = [("at least", self.at_least), ("at most", self.at_most)]
        return ", ".join(f"{word} {format_value(limit, self.unit)}" for word, limit in limits if limit is not None)


class QualityReport(Contract):
    """The whole batch in front of the gate.

    Invariant: `passed` is true exactly when every finding passed.
    """

    format_version: Literal[1] = 1
    passed: bool
    num_records: int = Field(ge=0)
    num_rows: int = Field(ge=0)
    num_rejected: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    num_loss_tokens: int = Field(ge=0)
    rows: RowCounts
    lengths: Distribution
    loss_tokens: Distribution
    ratio: Distribution
    window_cut_ratio: Distribution
    top_loss_counts: tuple[LossCount, ...]
    reject_reasons: dict[str, int]
    mix: Baseline
    baseline: Baseline | None
    findings: tuple[Finding, ...]
    thresholds: GateThresholds

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.passed != all(finding.passed for finding in self.findings):
            raise ValueError(f"passed is {self.passed}, which the findings contradict")
        return self

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that stop the batch; rules that name a cause come before those that see its effects."""
        return tuple(finding for finding in self.findings if not finding.passed)


def format_value(value: float | None, unit: Unit) -> str:
    """Write a measured value for people."""
    if value is None:
        return "none"
    if unit == "share":
        return f"{100 * value:.2f} %"
    return f"{value:,.0f} {unit}" if unit in ("rows", "files") else f"{value:.3f}"


def printable(text: str) -> str:
    """Make control, format and other invisible characters visible as escapes, so that no id can steer a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def _add(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in sorted({*first, *second})}
