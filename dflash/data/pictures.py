"""Histograms of a quality report as SVG, written from its fixed bins.

A plotting library would cost each flow a CPU second of imports. The price: nobody knows here which font the reader
has, so widths of texts are estimated, rather too wide than too narrow. Lengths are in units of the viewBox, about a
pixel of the report's page each.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from dflash.data.quality_report import Distribution, QualityReport

SOUND, ALARM, INK, FAINT, PAPER = "#3b6fb6", "#c8372d", "#1f2933", "#d9dee4", "#fff"
_WIDTH, _HEIGHT = 340, 204
_SHOWN_PER_UNIT: Final = 1.5  # where nothing else gives a size, as in the Prefect UI
_TOP, _BOTTOM, _RIGHT = 8, 166, 8  # of the plot: y of its top and its base line, least margin
_PEAK_ROOM: Final = 17  # above the highest bar, for its share
_FONT: Final = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"
_SIZE, _LARGE = 11, 12  # of tick labels, of the other texts
_IN_LARGE: Final = f'font-size="{_LARGE}"'
_LEVEL_STEPS: Final = (1, 2, 5)
_MAX_LEVELS: Final = 6  # above zero
_MAX_TICKS: Final = 11
_TICK_GAP: Final = 4
_SIDE_BINS: Final = 0.3
_BAR_GAP_BINS: Final = 0.06

Ticks = list[tuple[float, str]]  # where on the x axis, in bins from the first one drawn, and what it says


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where things are: bin i reaches from x(i) to x(i + 1), a bar of n rows from y(0) to y(n)."""

    left: float
    right: float
    num_bins: int
    peak: int

    def x(self, place: float) -> float:
        return self.left + (self.right - self.left) * (place + _SIDE_BINS) / (self.num_bins + 2 * _SIDE_BINS)

    def y(self, count: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP - _PEAK_ROOM) * count / self.peak


def render_pictures(report: QualityReport) -> dict[str, bytes]:
    """Draw length, loss tokens and ratio to output_tokens.

    Returns:
        SVG bytes by name (`lengths`, `loss_tokens`, `ratio`); distributions without a row are left out. Equal
        reports give equal bytes.
    """
    failed = {finding.rule for finding in report.failures}
    lost = report.top_loss_counts[0].num_loss_tokens if report.top_loss_counts else -1
    suspect = next((top.num_loss_tokens for top in report.top_loss_counts if top.num_unexplained), lost)
    tiny = float(report.thresholds.tiny_mask_tokens) if "tiny_mask" in failed else -1.0
    alarmed_loss = [
        ("single_loss_count" in failed and low <= suspect < high) or high <= tiny + 1
        for low, high in itertools.pairwise(report.loss_tokens.edges)
    ]
    ratio_failed = bool(failed & {"median_ratio", "ratio_mismatch"})
    tolerance = report.thresholds.ratio_tolerance + 1e-9
    alarmed_ratio = [
        ratio_failed and (low < 1 - tolerance or high > 1 + tolerance)
        for low, high in itertools.pairwise(report.ratio.edges)
    ]
    alarmed_length = [False] * len(report.lengths.bins)
    drawn = {
        "lengths": (report.lengths, alarmed_length, "tokens in the row", _label_edges),
        "loss_tokens": (report.loss_tokens, alarmed_loss, "loss tokens in the row", _label_edges),
        "ratio": (report.ratio, alarmed_ratio, "loss tokens / output_tokens", _label_middles),
    }
    return {name: _draw(*histogram) for name, histogram in drawn.items() if histogram[0].num_rows}


def _draw(
    distribution: Distribution,
    alarmed: Sequence[bool],
    label: str,
    label_bins: Callable[[Distribution, int, int], Iterator[Ticks]],
) -> bytes:
    """Bars of equal width a bin, from the first that holds a row to the last, with an empty one at each side."""
    filled = [place for place, count in enumerate(distribution.bins) if count]
    first, last = max(0, filled[0] - 1), min(len(distribution.bins), filled[-1] + 2)
    counts = distribution.bins[first:last]
    choices = list(label_bins(distribution, first, last))
    levels = _choose_levels(max(counts))
    frame = _Frame(
        left=_LARGE + 15 + _width(f"{levels[-1]:,}", _SIZE),
        right=_WIDTH - max(_RIGHT, _width(choices[0][-1][1], _SIZE) / 2),
        num_bins=len(counts),
        peak=max(counts),
    )
    parts = [
        *_open(f"{distribution.num_rows:,} rows by {label}"),
        *_grid(frame, levels),
        *_bars(frame, counts, alarmed[first:last]),
        *(_text(frame.x(place), _BOTTOM + 14, tick) for place, tick in _choose_ticks(frame, choices)),
        _name_peak(frame, counts, distribution.num_rows),
        _text((frame.left + frame.right) / 2, _HEIGHT - 7, label, _IN_LARGE),
        _text(0, 0, "rows", f'{_IN_LARGE} transform="translate({_LARGE} {(_TOP + _BOTTOM) // 2}) rotate(-90)"'),
        "</svg>",
    ]
    return "".join(parts).encode()


def _label_edges(distribution: Distribution, first: int, last: int) -> Iterator[Ticks]:
    """Labels for counts at the bins' edges, the finest choice first; the coarser ones have only powers of two."""
    edges = distribution.edges
    for step in (1, *range(2, len(edges) + 2, 2)):
        places = (place for place in range(first, last + 1) if place % step == 0)
        yield [(place - first, f"{edges[place]:,.0f}") for place in places]


def _label_middles(distribution: Distribution, first: int, last: int) -> Iterator[Ticks]:
    """Labels for ratios at the bins' middles, the finest choice first; each has 1 where its bin is drawn."""
    edges = distribution.edges
    one = bisect_right(edges, 1) - 1
    for step in (1, 2, 5, 10, 25, len(edges)):
        places = (place for place in range(first, last) if (place - one) % step == 0)
        middles = ((place, (edges[place] + edges[place + 1]) / 2 if place else 0) for place in places)
        yield [(place - first + 0.5, f"{round(middle, 2):g}") for place, middle in middles]


def _choose_ticks(frame: _Frame, choices: Iterable[Ticks]) -> Ticks:
    """The finest labels that have room beside each other."""

    def has_room(ticks: Ticks) -> bool:
        spans = [(frame.x(place), _width(label, _SIZE) / 2 + _TICK_GAP / 2) for place, label in ticks]
        apart = (x + half <= x_next - half_next for (x, half), (x_next, half_next) in itertools.pairwise(spans))
        return len(ticks) <= _MAX_TICKS and all(apart)

    return next(filter(has_room, choices))


def _choose_levels(peak: int) -> list[int]:
    """Round numbers of rows from zero to the top of the plot."""
    top = peak * (_BOTTOM - _TOP) / (_BOTTOM - _TOP - _PEAK_ROOM)
    steps = (digit * 10**power for power in itertools.count() for digit in _LEVEL_STEPS)
    step = next(step for step in steps if top // step <= _MAX_LEVELS)
    return list(range(0, int(top) + 1, step))


def _open(title: str) -> Iterator[str]:
    width, height = _number(_WIDTH * _SHOWN_PER_UNIT), _number(_HEIGHT * _SHOWN_PER_UNIT)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="{_SIZE}" fill="{INK}" text-anchor="middle">'
    )
    yield f'<title>{escape(title)}</title><rect width="{_WIDTH}" height="{_HEIGHT}" fill="{PAPER}"/>'


def _grid(frame: _Frame, levels: Iterable[int]) -> Iterator[str]:
    for level in levels:
        y = frame.y(level)
        yield f'<path d="M{_number(frame.left)} {_number(y)}H{_number(frame.right)}" stroke="{FAINT}"/>'
        yield _text(frame.left - 6, y + 0.35 * _SIZE, f"{level:,}", 'text-anchor="end"')


def _bars(frame: _Frame, counts: Iterable[int], alarmed: Iterable[bool]) -> Iterator[str]:
    width = _number(frame.x(1 - _BAR_GAP_BINS) - frame.x(0))
    for place, (count, alarm) in enumerate(zip(counts, alarmed, strict=True)):
        if count:
            x, y = frame.x(place + _BAR_GAP_BINS / 2), frame.y(count)
            yield (
                f'<rect x="{_number(x)}" y="{_number(y)}" width="{width}" height="{_number(_BOTTOM - y)}" '
                f'fill="{ALARM if alarm else SOUND}"/>'
            )


def _name_peak(frame: _Frame, counts: Sequence[int], num_rows: int) -> str:
    """Its share of the rows above the highest bar, in the plot even where that stands at its side."""
    share = f"{100 * frame.peak / num_rows:.0f} %"
    half = _width(share, _LARGE) / 2
    x = min(max(frame.x(counts.index(frame.peak) + 0.5), frame.left + half), frame.right - half)
    halo = f'{_IN_LARGE} stroke="{PAPER}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
    return _text(x, frame.y(frame.peak) - 5, share, halo)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}"{attributes and " " + attributes}>{escape(text)}</text>'


def _width(text: str, size: int) -> float:
    """About what the widest of the usual fonts takes, DejaVu Sans and Verdana."""
    return size * sum({" ": 0.37, ",": 0.37, ".": 0.37, "%": 1.08}.get(char, 0.64) for char in text)


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
