from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from io import BytesIO

import matplotlib.image
import numpy as np
import pyarrow as pa
import pytest

from dflash.config import GateThresholds
from dflash.data.quality import assess
from dflash.data.quality_report import Baseline, QualityReport
from dflash.data.report import render_html, render_markdown, render_pictures
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA

HOSTILE = '"><script>alert(1)</script>|`x` [a](javascript:b) \x1b[2J</code>\n# title'


def make_report(*, lost: int = 0, hostile: str = "", rows: int = 200) -> QualityReport:
    """A batch of `rows` rows of which `lost` have six loss tokens; `hostile` goes wherever a batch decides the text."""
    output = np.random.default_rng(1).integers(200, 900, rows).astype(np.int32)
    loss = np.where(np.arange(rows) < lost, 6, output).astype(np.int32)
    values = {
        "sample_id": [f"{hostile}{row}" for row in range(rows)],
        "source": [hostile or "chat"] * rows,
        "content_hash": [row.to_bytes(16, "big") for row in range(rows)],
        "num_tokens": loss + 40,
        "num_loss_tokens": loss,
        "output_tokens": output,
        "finish_reason": ["stop"] * rows,
        "flags": np.where(loss == output, 0, RowFlag.OUTPUT_MISMATCH).astype(np.uint16),
        "script": ["latin"] * rows,
    }
    table = pa.Table.from_arrays([pa.array(values[f.name], f.type) for f in INDEX_SCHEMA], schema=INDEX_SCHEMA)
    return assess(
        [table],
        reject_reasons={"bad_json" + hostile: 30},
        num_records=rows + 30,
        reject_examples={"bad_json" + hostile: [f"part.jsonl:{hostile}"]},
        thresholds=GateThresholds(),
        baseline=Baseline(sources={"chat" + hostile: 10}, scripts={"latin": 10}),
    )


class Page(HTMLParser):
    """Collects tags, sources of pictures and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_failed_page_says_at_the_top_why() -> None:
    page = Page(render_html(make_report(lost=174), "refused: s3://bucket/batch"))
    head = page.text.partition("allowed")[0]
    assert "Stopped by 6 of 17 rules" in head
    assert "same number of loss tokens (most often 6): 87.00 %" in head
    assert "id" not in page.sources
    assert "Look at" in page.text
    assert "part.jsonl:" in page.text


def test_a_page_needs_nothing_from_elsewhere() -> None:
    page = render_html(make_report(lost=174), "batch")
    found = Page(page)
    assert len(found.sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in found.sources)
    assert not re.search(r"https?:|@import|url\(", page)
    assert "script" not in found.tags


def test_pictures_are_valid_and_the_same_each_time() -> None:
    report = make_report(lost=174)
    pictures = render_pictures(report)
    assert set(pictures) == {"lengths", "loss_tokens", "ratio"}
    for picture in pictures.values():
        pixels = matplotlib.image.imread(BytesIO(picture), format="png")
        assert pixels.shape[1] > pixels.shape[0] > 300
    assert render_pictures(report) == pictures


def test_the_alarming_bars_are_drawn_in_another_colour() -> None:
    def is_red(picture: bytes) -> bool:
        red, green, blue = np.moveaxis(matplotlib.image.imread(BytesIO(picture), format="png")[..., :3], -1, 0)
        return bool(((red > 0.7) & (green < 0.3) & (blue < 0.3)).sum() > 500)

    failed, sound = render_pictures(make_report(lost=174)), render_pictures(make_report())
    assert (is_red(failed["loss_tokens"]), is_red(failed["ratio"])) == (True, True)
    assert (is_red(sound["loss_tokens"]), is_red(sound["ratio"])) == (False, False)


def test_drawing_leaves_no_global_figure() -> None:
    render_pictures(make_report())
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_hostile_text_is_shown_and_does_nothing() -> None:
    report = make_report(lost=174, hostile=HOSTILE)
    page = render_html(report, HOSTILE)
    found = Page(page)
    assert "script" not in found.tags
    assert "a" not in found.tags
    assert "\x1b" not in page
    assert "<script>alert(1)</script>" in found.text
    assert len(found.sources) == 3


def test_hostile_text_in_markdown_stays_text() -> None:
    text = render_markdown(make_report(lost=174, hostile=HOSTILE))
    assert "<script" not in text
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    assert not re.search(r"^# title", text, re.MULTILINE)
    rules = [line for line in text.splitlines() if line.startswith(("| ✅", "| ❌"))]
    assert len(rules) == 17
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in rules)


def test_markdown_has_verdict_findings_and_pictures() -> None:
    text = render_markdown(make_report(lost=174))
    assert text.startswith("# ❌ Stopped by 6 of 17 rules")
    assert "`0`" in text
    pictures = re.findall(r"!\[(\w+)\]\(data:image/png;base64,([^)]+)\)", text)
    assert [name for name, _ in pictures] == ["loss_tokens", "ratio", "lengths"]
    assert base64.b64decode(pictures[0][1]).startswith(b"\x89PNG")


@pytest.mark.parametrize("render", [render_markdown, lambda report: render_html(report, "t")])
def test_a_batch_without_a_row_has_a_report_too(render: object) -> None:
    report = make_report(rows=0)
    assert render_pictures(report) == {}
    assert callable(render)
    assert "Rows in the batch" in render(report)


def test_many_sources_are_cut_to_a_readable_table() -> None:
    report = make_report()
    names = {f"s{number}": 1 for number in range(300)}
    crowded = report.model_copy(update={"mix": Baseline(sources=names, scripts={"latin": 200})})
    page = Page(render_html(crowded, "t"))
    assert "281 more" in page.text
