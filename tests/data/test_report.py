from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from html.parser import HTMLParser
from itertools import combinations, pairwise
from typing import NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from dflash.config import GateThresholds
from dflash.data.pictures import ALARM, SOUND
from dflash.data.quality import assess
from dflash.data.quality_numbers import COUNT_EDGES, RATIO_EDGES
from dflash.data.quality_report import Baseline, Distribution, QualityReport
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


REPORT = make_report(lost=174)


class Bar(NamedTuple):
    """A bar of a picture, y downwards."""

    left: float
    top: float
    width: float
    height: float
    colour: str


class Text(NamedTuple):
    """A text of a picture and the box of its ink, y downwards."""

    text: str
    x: float
    left: float
    top: float
    right: float
    bottom: float


class Drawing:
    """What a picture shows; `levels` are the y of the grid's lines, `sides` the x of their ends."""

    def __init__(self, picture: bytes) -> None:
        self.root = ET.fromstring(picture)  # noqa: S314 - our own bytes
        found = {tag: list(self.root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")) for tag in ("rect", "text", "path")}
        box = [[float(rect.get(name, 0)) for name in ("x", "y", "width", "height")] for rect in found["rect"]]
        self.paper = tuple(box[0])
        colours = [rect.attrib["fill"] for rect in found["rect"]]
        self.bars = [Bar(*sizes, colour) for sizes, colour in zip(box[1:], colours[1:], strict=True)]
        self.texts = [self._read_text(text) for text in found["text"]]
        lines = [[float(part) for part in re.split("[MH ]", path.attrib["d"])[1:]] for path in found["path"]]
        self.sides = (lines[0][0], lines[0][2])
        self.levels = [line[1] for line in lines]

    def text(self, wanted: str) -> Text:
        [found] = [text for text in self.texts if text.text == wanted]
        return found

    @property
    def ticks(self) -> list[Text]:
        """Labels of the x axis, which stand under the lowest line; what else stands there has letters."""
        return [text for text in self.texts if text.top > max(self.levels) and not re.search("[a-z]", text.text)]

    @property
    def level_labels(self) -> list[Text]:
        """Labels of the y axis, which stand left of the lines."""
        return [text for text in self.texts if text.right < self.sides[0] and text.text != "rows"]

    def _read_text(self, element: ET.Element) -> Text:
        text, x, y = element.text or "", float(element.attrib["x"]), float(element.attrib["y"])
        given = self.root.attrib | element.attrib
        low, high, under, over = (float(given["font-size"]) * share for share in measure_ink(text))
        start = x - (high + low) * {"middle": 0.5, "end": 1}[given["text-anchor"]]
        box = (start + low, y - over, start + high, y - under)
        if turned := re.fullmatch(r"translate\((\S+) (\S+)\) rotate\(-90\)", element.get("transform", "")):
            right, down = map(float, turned.groups())
            box = (right + box[1], down - box[2], right + box[3], down - box[0])
        return Text(text, x, *box)


@cache
def measure_ink(text: str) -> tuple[float, float, float, float]:
    """Left, right, lowest and highest ink of a text in DejaVu Sans, the widest font of the usual ones; font size 1."""
    box = TextPath((0, 0), text, size=100, prop=FontProperties(family="DejaVu Sans")).get_extents()
    return box.x0 / 100, box.x1 / 100, box.y0 / 100, box.y1 / 100


def data_uri(picture: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture).decode()


def spread(edges: tuple[float, ...], counts: Mapping[int, int]) -> Distribution:
    """A distribution with `counts` rows by bin."""
    bins = tuple(counts.get(place, 0) for place in range(len(edges) - 1))
    middle = 1.0 if any(bins) else None
    places = dict.fromkeys(("mean", "low", "p1", "median", "p99", "high"), middle)
    return Distribution(edges=edges, bins=bins, num_rows=sum(bins), **places)


def draw(name: str, counts: Mapping[int, int], report: QualityReport = REPORT) -> Drawing:
    """One picture of `report` with other bins."""
    edges = RATIO_EDGES if name == "ratio" else COUNT_EDGES
    return Drawing(render_pictures(report.model_copy(update={name: spread(edges, counts)}))[name])


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
    page, pictures = render_html(REPORT, "batch"), render_pictures(REPORT)
    found = Page(page)
    assert found.sources == [data_uri(pictures[name]) for name in ("loss_tokens", "ratio", "lengths")]
    assert not re.search(r"https?:|@import|url\(", page)
    assert "script" not in found.tags


@pytest.mark.parametrize("name", ["lengths", "loss_tokens", "ratio"])
def test_a_picture_needs_nothing_from_elsewhere_and_says_what_it_is(name: str) -> None:
    picture = render_pictures(REPORT)[name]
    root = Drawing(picture).root
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["role"] == "img"
    assert root[0].tag.endswith("}title")
    assert "200 rows" in (root[0].text or "")
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert float(root.attrib["width"]) / float(root.attrib["height"]) == pytest.approx(width / height)
    assert Drawing(picture).paper == (0, 0, width, height)
    assert {element.tag.partition("}")[2] for element in root.iter()} == {"svg", "title", "rect", "path", "text"}
    assert not re.search(rb"href|url\(|@import|https?://(?!www\.w3\.org/2000/svg\")", picture)


def test_equal_reports_give_equal_pictures() -> None:
    pictures = render_pictures(make_report(lost=174))
    assert list(pictures) == ["lengths", "loss_tokens", "ratio"]
    assert pictures == render_pictures(REPORT)
    assert len(set(pictures.values())) == 3
    assert max(map(len, pictures.values())) < 4_000


@pytest.mark.parametrize("lost", [0, 174])
@pytest.mark.parametrize("name", ["lengths", "loss_tokens", "ratio"])
def test_each_filled_bin_is_a_bar_in_its_place_as_high_as_its_count(name: str, lost: int) -> None:
    report = make_report(lost=lost)
    bins: tuple[int, ...] = getattr(report, name).bins
    drawing = Drawing(render_pictures(report)[name])
    counts = [count for count in bins if count]
    places = [place for place, count in enumerate(bins) if count]
    assert [bar.height / drawing.bars[0].height for bar in drawing.bars] == pytest.approx(
        [count / counts[0] for count in counts], rel=0.01
    )
    assert len({bar.width for bar in drawing.bars}) == 1
    assert [bar.top + bar.height for bar in drawing.bars] == pytest.approx([max(drawing.levels)] * len(counts))
    # A bin is a little wider than its bar; as wide in the whole picture.
    step = drawing.bars[0].width / 0.94
    assert [bar.left - drawing.bars[0].left for bar in drawing.bars] == pytest.approx(
        [step * (place - places[0]) for place in places], abs=0.05
    )
    # An empty bin at each side, where there is one, and no second one.
    sides = (drawing.bars[0].left - drawing.sides[0], drawing.sides[1] - drawing.bars[-1].left - drawing.bars[-1].width)
    empty = (min(places[0], 1), min(len(bins) - 1 - places[-1], 1))
    assert [side / step - bins_beside for side, bins_beside in zip(sides, empty, strict=True)] == pytest.approx(
        [0.33, 0.33], abs=0.05
    )


def test_levels_are_round_numbers_at_the_height_of_as_many_rows() -> None:
    for peak in (1, 2, 3, 7, 12, 14, 99, 174, 5_000, 902_500, 1_095_082, 1_234_567_890):
        drawing = draw("lengths", {20: peak, 21: 1})
        values = [int(text.text.replace(",", "")) for text in drawing.level_labels]
        assert [text.text for text in drawing.level_labels] == [f"{value:,}" for value in values]
        steps = {high - low for low, high in pairwise(values)}
        assert values[0] == 0
        assert re.fullmatch("[125]0*", str(*steps))
        assert (2 if peak < 3 else 3) <= len(values) <= 7
        base, scale = max(drawing.levels), drawing.bars[0].height / peak
        assert drawing.levels == pytest.approx([base - scale * value for value in values], abs=0.02)
        middles = [(text.top + text.bottom) / 2 for text in drawing.level_labels]
        assert middles == pytest.approx(drawing.levels, abs=1.5)


@pytest.mark.parametrize(
    ("rules", "name", "alarming"),
    [
        ((), "loss_tokens", ()),
        ((), "ratio", ()),
        (("single_loss_count",), "loss_tokens", (5,)),  # six tokens, which 174 rows have
        (("single_loss_count",), "ratio", ()),
        (("tiny_mask",), "loss_tokens", (0, 1, 2, 3, 4, 5)),  # at most seven tokens: [6, 8) is the last
        (("median_ratio",), "loss_tokens", ()),
        (("median_ratio",), "ratio", (*range(25), *range(26, 51))),  # all but 0.98 to 1.02
        (("ratio_mismatch",), "ratio", (*range(25), *range(26, 51))),
        (("single_loss_count", "tiny_mask", "median_ratio", "ratio_mismatch"), "lengths", ()),
    ],
)
def test_bars_that_a_failed_rule_is_about_have_the_other_colour(
    rules: tuple[str, ...], name: str, alarming: tuple[int, ...]
) -> None:
    findings = [finding for finding in REPORT.findings if finding.passed or finding.rule in rules]
    thresholds = GateThresholds(tiny_mask_tokens=7)
    report = REPORT.model_copy(update={"findings": tuple(findings), "thresholds": thresholds})
    assert {finding.rule for finding in report.failures} == set(rules)
    num_bins = len(getattr(report, name).bins)
    colours = [bar.colour for bar in draw(name, dict.fromkeys(range(num_bins), 3), report).bars]
    assert colours == [ALARM if place in alarming else SOUND for place in range(num_bins)]


def test_alarming_bars_are_in_a_failed_report_and_not_in_a_sound_one() -> None:
    failed, sound = render_pictures(REPORT), render_pictures(make_report())
    alarmed = {name: [bar.colour for bar in Drawing(picture).bars].count(ALARM) for name, picture in failed.items()}
    assert alarmed == {"lengths": 0, "loss_tokens": 1, "ratio": 2}
    assert not any(ALARM.encode() in picture for picture in sound.values())


def test_counts_are_labelled_at_edges_and_ratios_at_middles() -> None:
    pictures = {name: Drawing(picture) for name, picture in render_pictures(REPORT).items()}
    loss, ratio = pictures["loss_tokens"], pictures["ratio"]
    assert [text.text for text in loss.ticks] == ["4", "8", "16", "32", "64", "128", "256", "512", "1,024"]
    assert loss.bars[0].left + loss.bars[0].width == pytest.approx(loss.text("8").x, abs=1)  # six is in [6, 8)
    assert [text.text for text in ratio.ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert ratio.bars[-1].left + ratio.bars[-1].width / 2 == pytest.approx(ratio.ticks[-1].x, abs=0.05)
    assert [pictures[name].texts[-2].text for name in pictures] == [
        "tokens in the row",
        "loss tokens in the row",
        "loss tokens / output_tokens",
    ]
    for drawing in pictures.values():
        assert drawing.text("rows").right < min(text.left for text in drawing.level_labels)


def test_the_highest_bar_says_its_share() -> None:
    drawing = draw("lengths", {20: 870, 24: 130})
    share, bar = drawing.text("87 %"), drawing.bars[0]
    assert share.x == pytest.approx(bar.left + bar.width / 2, abs=0.05)
    assert bar.top - 8 < share.bottom < bar.top
    assert sum("%" in text.text for text in drawing.texts) == 1
    # One at the side of the picture, and narrower than what it says, stays off the labels of the levels.
    for counts in ({0: 1_000, 39: 1}, {0: 1, 39: 1_000}):
        drawing = draw("lengths", counts)
        assert drawing.sides[0] <= drawing.text("100 %").left
        assert drawing.text("100 %").right <= drawing.sides[1]


@pytest.mark.parametrize("name", ["lengths", "ratio"])
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(0, 50), st.integers(1, 20) | st.integers(1, 2_000_000_000), min_size=1))
@example({30: 1_095_082, 36: 3, 38: 3})  # long labels at both axes, one beside the other
@example({0: 2_000_000_000, 39: 1})  # "100 %" over a bar that is narrower, beside the highest level
@example(dict.fromkeys(range(51), 1_095_082))
def test_no_text_is_cut_or_lies_on_another(name: str, counts: dict[int, int]) -> None:
    num_bins = len(RATIO_EDGES if name == "ratio" else COUNT_EDGES) - 1
    drawing = draw(name, {place % num_bins: count for place, count in counts.items()})
    _, _, width, height = drawing.paper
    for text in drawing.texts:
        assert text.left >= 0, text
        assert text.top >= 0, text
        assert text.right <= width, text
        assert text.bottom <= height, text
    for one, other in combinations(drawing.texts, 2):
        assert one.right < other.left or other.right < one.left or one.bottom < other.top or other.bottom < one.top, (
            one,
            other,
        )
    assert 2 <= len(drawing.ticks) <= 11


@pytest.mark.parametrize(
    ("name", "place", "ticks"),
    [
        ("lengths", 0, ["0", "1", "2"]),
        ("lengths", 20, ["724", "1,024", "1,448", "2,048"]),
        ("lengths", 39, ["524,288", "741,455", "1,048,576"]),
        ("ratio", 0, ["0", "0.04"]),
        ("ratio", 25, ["0.96", "1", "1.04"]),
        ("ratio", 50, ["1.96", "2"]),
    ],
)
@pytest.mark.parametrize("count", [1, 1_095_082])
def test_one_filled_bin(name: str, place: int, ticks: list[str], count: int) -> None:
    drawing = draw(name, {place: count})
    assert len(drawing.bars) == 1
    assert [text.text for text in drawing.ticks] == ticks
    assert drawing.text("100 %")


@pytest.mark.parametrize("name", ["lengths", "loss_tokens", "ratio"])
def test_a_distribution_without_a_row_is_left_out(name: str) -> None:
    edges = RATIO_EDGES if name == "ratio" else COUNT_EDGES
    report = REPORT.model_copy(update={name: spread(edges, {})})
    assert set(render_pictures(report)) == {"lengths", "loss_tokens", "ratio"} - {name}
    assert len(Page(render_html(report, "t")).sources) == 2


def test_a_report_loads_no_plotting_library() -> None:
    code = """
import sys
from dflash.data.quality_report import QualityReport
from dflash.data.report import render_html, render_markdown
report = QualityReport.model_validate_json(sys.stdin.read())
print(render_html(report, "t").count("data:image"), render_markdown(report).count("data:image"))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"matplotlib", "PIL", "pandas", "plotly"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=REPORT.model_dump_json(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["3 3", "[]"]


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
    pictures = re.findall(r"!\[(\w+)\]\(([^)]+)\)", text)
    assert [name for name, _ in pictures] == ["loss_tokens", "ratio", "lengths"]
    assert dict(pictures) == {name: data_uri(picture) for name, picture in render_pictures(REPORT).items()}


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
