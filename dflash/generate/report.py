"""Spot checks of a batch: counts, and records to read, drawn and worst; as Markdown and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from dflash.data.discovery import SUCCESS
from dflash.data.quality_report import printable
from dflash.data.strict_json import parse_json
from dflash.errors import ObjectNotFoundError, PreconditionError, RecordError, StorageError
from dflash.generate.looks import LOOP_RATIO, BatchCounts, Place
from dflash.generate.outcome import Outcome
from dflash.storage import Store

SHOWN_CHARACTERS: Final = 700
MARK_NAMES: Final = {
    "loop": f"repetition loops (compress {LOOP_RATIO:g} times or more)",
    "refusal": "refusals",
    "think_only": "a trace without an answer",
    "thinking_truncated": "thinking cut by the token limit",
    "no_ids": "no sampled token ids",
}
_REPORT_JSON, _REPORT_MARKDOWN = "_report.json", "_report.md"


@dataclass(frozen=True, slots=True)
class Sample:
    """A record to read: ends of long texts are cut."""

    id: str
    why: str
    question: str
    trace: str
    answer: str
    output_tokens: int | None
    ratio: float


@dataclass(frozen=True, slots=True)
class Failures:
    """What a run gave up: fields of its `_SUCCESS`."""

    num_prompts: int
    num_failed: int
    failed_tries: dict[str, int]

    @classmethod
    def of(cls, outcome: Outcome) -> Failures:
        """Of a run that has just ended."""
        return cls(outcome.num_prompts, outcome.num_failed, outcome.kinds)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a batch holds; counts are records.

    Attributes:
        failures: of the run that made or completed the batch; None where they aren't known.
    """

    batch: str
    num_records: int
    output_tokens: int
    prompt_tokens: int
    finish_reasons: Mapping[str, int]
    scripts: Mapping[str, int]
    sources: Mapping[str, int]
    marks: Mapping[str, int]
    compression: Mapping[str, int]
    examples: Mapping[str, list[str]]
    samples: list[Sample] = field(default_factory=list)
    failures: Failures | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return asdict(self)


def assess_batch(store: Store, counts: BatchCounts, outcome: Outcome | None = None) -> BatchReport:
    """Put the report together; reads the parts that hold its samples.

    Args:
        store: the batch's folder.
        counts: of its records.
        outcome: of the run; without one `_SUCCESS` is asked what failed.
    """
    failures = _failures_of(store) if outcome is None else Failures.of(outcome)
    return BatchReport(
        failures=failures,
        batch=store.uri,
        num_records=counts.num_records,
        output_tokens=counts.output_tokens,
        prompt_tokens=counts.prompt_tokens,
        finish_reasons=dict(counts.finishes.most_common()),
        scripts=dict(counts.scripts.most_common()),
        sources=dict(counts.sources.most_common(50)),
        marks={mark: counts.marks[mark] for mark in MARK_NAMES},
        compression={f"{ratio}-{ratio + 1}": count for ratio, count in sorted(counts.ratios.items())},
        examples=counts.examples,
        samples=[*_samples(store, counts.drawn, "drawn"), *_samples(store, reversed(counts.worst), "compresses best")],
    )


def _failures_of(store: Store) -> Failures | None:
    try:
        return msgspec.json.decode(store.read(SUCCESS), type=Failures)
    except (ObjectNotFoundError, msgspec.MsgspecError):  # not complete yet, or another program's
        return None


def save_report(store: Store, report: BatchReport) -> None:
    """Keep the report in the batch, over an earlier one; of runs that do so at once the last one's stays."""
    data = msgspec.json.format(msgspec.json.encode(report.to_json()), indent=2) + b"\n"
    for key, content in ((_REPORT_JSON, data), (_REPORT_MARKDOWN, render_markdown(report).encode())):
        while not _replaced(store, key, content):
            continue  # each time another run has put its own


def _replaced(store: Store, key: str, content: bytes) -> bool:
    try:
        store.replace(key, content, if_match=_etag(store, key))
    except PreconditionError:
        return False
    return True


def _etag(store: Store, key: str) -> str | None:
    try:
        return store.head(key).etag
    except ObjectNotFoundError:
        return None


def render_markdown(report: BatchReport) -> str:
    """The report as GitHub-flavoured Markdown."""
    tokens = report.output_tokens / report.num_records if report.num_records else 0
    parts = [
        f"# Batch {_md(report.batch)}",
        "",
        (
            f"{report.num_records:,} records, {report.output_tokens:,} sampled tokens ({tokens:,.0f} a record), "
            f"{report.prompt_tokens:,} prompt tokens."
        ),
        "",
        *_failure_lines(report),
        "| to look at | records | share | such as |",
        "|---|---:|---:|---|",
    ]
    for mark, count in report.marks.items():
        examples = ", ".join(f"`{_plain(name)}`" for name in report.examples.get(mark, [])[:3])
        parts.append(f"| {MARK_NAMES[mark]} | {count:,} | {_share(count, report.num_records)} | {examples} |")
    for title, mix in (
        ("finish reason", report.finish_reasons),
        ("script", report.scripts),
        ("source", report.sources),
        ("compressed", report.compression),
    ):
        parts += ["", f"| {title} | records | share |", "|---|---:|---:|"]
        parts += [f"| {_md(name) or '(none)'} | {n:,} | {_share(n, report.num_records)} |" for name, n in mix.items()]
    for sample in report.samples:
        parts += _sample_lines(sample)
    return "\n".join(parts) + "\n"


def _failure_lines(report: BatchReport) -> list[str]:
    found = report.failures
    if found is None:
        return []
    tries = ", ".join(f"{_md(kind)} {count:,}" for kind, count in sorted(found.failed_tries.items()))
    share = f"{100 * found.num_failed / max(1, found.num_prompts):.3f} %"
    return [
        f"{found.num_failed:,} of {found.num_prompts:,} prompts failed ({share}); failed tries: {tries or 'none'}.",
        "",
    ]


def _samples(store: Store, places: Iterable[Place], why: str) -> list[Sample]:
    """The records at some places, in that order; each part is read once."""
    wanted = list(places)
    by_part: dict[str, set[str]] = defaultdict(set)
    for place in wanted:
        by_part[place.part].add(place.id)
    found: dict[str, Sample] = {}
    for part, ids in by_part.items():
        for record in _find(store, part, ids):
            ratio = next((place.key for place in wanted if place.id == record["id"]), 0.0)
            found[record["id"]] = _sample(record, why, ratio if why != "drawn" else 0.0)
    return [found[place.id] for place in wanted if place.id in found]


def _find(store: Store, part: str, ids: set[str]) -> list[dict[str, Any]]:
    try:
        lines = store.read(part).split(b"\n")
    except StorageError:  # samples are worth less than the run that asks for them
        return []
    records = []
    for line in lines:
        try:
            record = parse_json(line) if line else {}
        except RecordError:
            continue
        if isinstance(record, dict) and record.get("id") in ids:
            records.append(record)
    return records


def _sample(record: Mapping[str, Any], why: str, ratio: float) -> Sample:
    *before, message = record["messages"]
    answer = message.get("content") or ""
    if message.get("tool_calls"):
        answer = f"{answer}\n{msgspec.json.encode(message['tool_calls']).decode()}".strip()
    return Sample(
        id=record["id"],
        why=why,
        question=_cut(before[-1].get("content") if before else ""),
        trace=_cut(message.get("reasoning_content")),
        answer=_cut(answer),
        output_tokens=record.get("output_tokens"),
        ratio=ratio,
    )


def _cut(text: Any) -> str:
    """A text's beginning and end."""
    plain = text if isinstance(text, str) else "" if text is None else msgspec.json.encode(text).decode()
    if len(plain) <= SHOWN_CHARACTERS:
        return plain
    half = SHOWN_CHARACTERS // 2
    return f"{plain[:half]} [... {len(plain) - 2 * half:,} characters ...] {plain[-half:]}"


def _sample_lines(sample: Sample) -> list[str]:
    tokens = "?" if sample.output_tokens is None else f"{sample.output_tokens:,}"
    ratio = f", {sample.ratio:.1f} times" if sample.ratio else ""
    lines = ["", f"### `{_plain(sample.id)}` ({sample.why}{ratio}, {tokens} tokens)"]
    for name, text in (("question", sample.question), ("trace", sample.trace), ("answer", sample.answer)):
        if text:
            lines += ["", f"{name}:", "", *("    " + line for line in printable(text).splitlines())]
    return lines


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.2f} %" if total else ""


def _plain(text: str) -> str:
    """A text that can't end a code span or a table cell."""
    return printable(text).replace("`", "'").replace("|", "/").replace("\n", " ")


def _md(text: str) -> str:
    shown = _plain(text).replace("\\", "\\\\")
    for char in "*_[]#<>":
        shown = shown.replace(char, "\\" + char)
    return shown
