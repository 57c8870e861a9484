"""The quality report for people: Markdown for an artifact, and a page of its own that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from dflash.data.pictures import render_pictures
from dflash.data.quality_report import Distribution, Finding, QualityReport, printable
from dflash.data.report_style import STYLE

__all__ = ["render_html", "render_markdown", "render_pictures"]

CAPTIONS: Final = {
    "loss_tokens": "Loss tokens a row",
    "ratio": "Loss tokens / output_tokens",
    "lengths": "Tokens a row",
}
_WINDOW_CUT_CAPTION: Final = "Loss tokens / output_tokens of rows cut at max_seq_len"
_MAX_MIX_ROWS: Final = 20


def render_markdown(report: QualityReport) -> str:
    """Write the report as GitHub-flavoured Markdown with the histograms as data URIs."""
    parts = [f"# {'✅' if report.passed else '❌'} {_md(headline(report))}", "", _md(_summary(report)), ""]
    for finding in report.failures:
        parts += [
            f"### ❌ {_md(finding.title)}: {finding.value_text} (allowed {finding.limit_text})",
            "",
            _md(finding.meaning),
            "",
            f"**Look at:** {_md(finding.look_at)}",
            "",
        ]
        if finding.examples:
            parts += ["Examples: " + ", ".join(_code(name) for name in finding.examples), ""]
    for name, picture in _pictures(report).items():
        parts += [f"**{_md(CAPTIONS[name])}** ({_places(report, name)})", "", f"![{name}]({_data_uri(picture)})", ""]
    if report.window_cut_ratio.num_rows:
        places = _places(report, "window_cut_ratio")
        parts += [f"**{_md(_WINDOW_CUT_CAPTION)}** ({report.window_cut_ratio.num_rows:,} rows: {places})", ""]
    parts += ["| | rule | found | allowed | behind it |", "|---|---|---:|---|---:|"]
    for finding in report.findings:
        cells = (_md(finding.title), finding.value_text, finding.limit_text, f"{finding.count:,}")
        parts.append(f"| {'✅' if finding.passed else '❌'} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def render_html(report: QualityReport, title: str) -> str:
    """Write the report as one page: no script, no font, no picture from elsewhere; every text is escaped."""
    verdict = "passed" if report.passed else "stopped"
    body = [
        f'<header class="{verdict}"><p class="batch">{_html(title)}</p>',
        f"<h1>{_html(headline(report))}</h1><p>{_html(_summary(report))}</p></header>",
        _facts(report),
        '<section class="pictures">',
        *(_figure(name, picture, report) for name, picture in _pictures(report).items()),
        "</section>",
        *_failures(report.failures),
        _rules(report.findings),
        f'<section class="tables"><div>{_loss_counts(report)}{_window_cut(report)}</div><div>',
        _mix("Sources", report.mix.sources, report.baseline.sources if report.baseline else None),
        _mix("Scripts", report.mix.scripts, report.baseline.scripts if report.baseline else None),
        _mix("Rejected records", report.reject_reasons, None),
        "</div></section>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_html(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def headline(report: QualityReport) -> str:
    """The verdict in one line."""
    if report.passed:
        return f"Passed: all {len(report.findings)} rules hold over {report.num_rows:,} rows"
    first = report.failures[0]
    rules = f"{len(report.failures)} of {len(report.findings)} rules"
    return f"Stopped by {rules}. {first.title}: {first.value_text}"


def _summary(report: QualityReport) -> str:
    rows = report.rows
    confirmed = f"{100 * rows.confirmed / report.num_rows:.1f} %" if report.num_rows else "none"
    return (
        f"{report.num_records:,} records gave {report.num_rows:,} rows with {report.num_tokens:,} tokens, "
        f"{report.num_loss_tokens:,} of them loss tokens; {report.num_rejected:,} records were rejected. "
        f"The mask of {confirmed} of the rows is confirmed by output_tokens or sampled ids."
    )


def _pictures(report: QualityReport) -> dict[str, bytes]:
    pictures = render_pictures(report)
    return {name: pictures[name] for name in CAPTIONS if name in pictures}


def _places(report: QualityReport, name: str) -> str:
    distribution: Distribution = getattr(report, name)
    places = {"p1": distribution.p1, "median": distribution.median, "p99": distribution.p99, "max": distribution.high}
    digits = 3 if name.endswith("ratio") else 0
    return ", ".join(f"{label} {value:,.{digits}f}" for label, value in places.items() if value is not None)


def _facts(report: QualityReport) -> str:
    facts = {
        "rows": f"{report.num_rows:,}",
        "tokens": f"{report.num_tokens:,}",
        "loss tokens": f"{report.num_loss_tokens:,}",
        "rejected": f"{report.num_rejected:,}",
        "median ratio": "none" if report.ratio.median is None else f"{report.ratio.median:.3f}",
        "exact masks": f"{report.rows.equal_output_tokens:,}",
    }
    tiles = "".join(f"<div><b>{_html(value)}</b><span>{name}</span></div>" for name, value in facts.items())
    return f'<section class="facts">{tiles}</section>'


def _failures(findings: Iterable[Finding]) -> Iterable[str]:
    """A card for each; a list of examples that was shown before isn't repeated."""
    shown: dict[tuple[str, ...], str] = {}
    for finding in findings:
        examples = "".join(f"<li><code>{_html(name)}</code></li>" for name in finding.examples)
        if finding.examples in shown:
            listed = f'<p class="label">Examples as under “{_html(shown[finding.examples])}”</p>'
        elif examples:
            listed = f'<p class="label">Examples</p><ul class="examples">{examples}</ul>'
            shown[finding.examples] = finding.title
        else:
            listed = ""
        yield (
            f'<article class="failure"><div class="number"><b>{finding.value_text}</b>'
            f"<span>allowed {finding.limit_text}</span><span>{finding.count:,} {_counted(finding)}</span></div>"
            f"<div><h2>{_html(finding.title)}</h2><p>{_html(finding.meaning)}</p>"
            f'<p class="look"><b>Look at</b> {_html(finding.look_at)}</p>{listed}</div></article>'
        )


def _figure(name: str, picture: bytes, report: QualityReport) -> str:
    places = _places(report, name)
    return (
        f"<figure><figcaption><b>{CAPTIONS[name]}</b><span>{places}</span></figcaption>"
        f'<img alt="{CAPTIONS[name]}: {places}" src="{_data_uri(picture)}"></figure>'
    )


def _counted(finding: Finding) -> str:
    if finding.unit == "files":
        return "files"
    return "records" if finding.rule == "empty" or finding.rule.startswith("rejected") else "rows"


def _rules(findings: Iterable[Finding]) -> str:
    rows = [
        [
            '<span class="ok">passed</span>' if finding.passed else '<span class="bad">failed</span>',
            _html(finding.title),
            finding.value_text,
            finding.limit_text,
            f"{finding.count:,} {_counted(finding)}",
        ]
        for finding in findings
    ]
    return '<h2 class="part">All rules</h2>' + _table(
        ["", "rule", "found", "allowed", "behind it"], rows, text_columns=2
    )


def _loss_counts(report: QualityReport) -> str:
    rows = [
        [
            f"{top.num_loss_tokens:,}",
            f"{top.num_rows:,}",
            _share(top.num_rows, report.num_rows),
            f"{top.num_unexplained:,}",
        ]
        for top in report.top_loss_counts
    ]
    table = _table(["loss tokens", "rows", "share", "unexplained"], rows)
    return f"<div><h2>Commonest numbers of loss tokens</h2>{table}</div>"


def _window_cut(report: QualityReport) -> str:
    """How much of the sampled tokens the window left; the gate compares these rows apart."""
    ratio = report.window_cut_ratio
    if not ratio.num_rows:
        return ""
    places = [f"{value:.3f}" for value in (ratio.p1, ratio.median, ratio.p99) if value is not None]
    table = _table(["rows", "p1", "median", "p99"], [[f"{ratio.num_rows:,}", *places]], text_columns=0)
    return f"<div><h2>{_html(_WINDOW_CUT_CAPTION)}</h2>{table}</div>"


def _mix(title: str, counts: Mapping[str, int], before: Mapping[str, int] | None) -> str:
    """One table of names by size, with the current version's shares beside it."""
    if not counts:
        return ""
    old = before or {}
    names = sorted({*counts, *old}, key=lambda name: (-counts.get(name, 0), name))
    groups = {printable(name) or "(not given)": [name] for name in names[:_MAX_MIX_ROWS]}
    if len(names) > _MAX_MIX_ROWS:
        groups[f"{len(names) - _MAX_MIX_ROWS:,} more"] = names[_MAX_MIX_ROWS:]
    rows = []
    for label, members in groups.items():
        count, count_old = (sum(mix.get(name, 0) for name in members) for mix in (counts, old))
        row = [_html(label), f"{count:,}", _share(count, sum(counts.values()))]
        rows.append(row if before is None else [*row, _share(count_old, sum(old.values()))])
    heads = ["name", "records", "share", *(["current version"] if before is not None else [])]
    return f"<div><h2>{title}</h2>{_table(heads, rows)}</div>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Cells are HTML already; those behind the first `text_columns` are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["" if place < text_columns else ' class="num"' for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(heads, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %" if total else ""


def _data_uri(picture: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture).decode()


def _html(text: str) -> str:
    return escape(printable(text), quote=True)


def _md(text: str) -> str:
    """Plain text for Markdown: no markup, no HTML, no table cell of its own."""
    escaped = printable(text).replace("\\", "\\\\")
    for char in "`*_[]#|":
        escaped = escaped.replace(char, "\\" + char)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    """A code span; one that holds more than plain characters as HTML, so that nothing in it can end it."""
    shown = printable(text)
    if shown and all(char.isalnum() or char in "-._:/ " for char in shown) and shown == shown.strip():
        return f"`{shown}`"
    return "<code>" + "".join(char if char.isalnum() else f"&#{ord(char)};" for char in shown) + "</code>"
