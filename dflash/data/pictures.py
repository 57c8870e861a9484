"""Histograms of a quality report as PNG, drawn from its fixed bins; no global state of matplotlib is touched."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any, Final

import numpy as np

from dflash.data.quality_report import Distribution, QualityReport

SOUND, ALARM, INK, FAINT = "#3b6fb6", "#c8372d", "#1f2933", "#d9dee4"
_SIZE_INCHES: Final = (4.4, 2.6)
_DOTS_PER_INCH: Final = 180
_MAX_TICKS: Final = 9
_HIGHEST_RATIO_EDGE: Final = 2.02


def render_pictures(report: QualityReport) -> dict[str, bytes]:
    """Draw length, loss tokens and ratio to output_tokens.

    Returns:
        PNG bytes by name (`lengths`, `loss_tokens`, `ratio`); distributions without a row are left out. Equal
        reports give equal bytes.
    """
    failed = {finding.rule for finding in report.failures}
    lost = report.top_loss_counts[0].num_loss_tokens if report.top_loss_counts else -1
    suspect = next((top.num_loss_tokens for top in report.top_loss_counts if top.num_unexplained), lost)
    tiny = float(report.thresholds.tiny_mask_tokens) if "tiny_mask" in failed else -1.0
    alarmed_loss = [
        ("single_loss_count" in failed and low <= suspect < high) or high <= tiny + 1
        for low, high in _pairs(report.loss_tokens)
    ]
    ratio_failed = bool(failed & {"median_ratio", "ratio_mismatch"})
    tolerance = report.thresholds.ratio_tolerance + 1e-9
    alarmed_ratio = [
        ratio_failed and (low < 1 - tolerance or high > 1 + tolerance) for low, high in _pairs(report.ratio)
    ]
    alarmed_length = [False] * len(report.lengths.bins)
    drawn = {
        "lengths": (report.lengths, alarmed_length, "tokens in the row"),
        "loss_tokens": (report.loss_tokens, alarmed_loss, "loss tokens in the row"),
        "ratio": (report.ratio, alarmed_ratio, "loss tokens / output_tokens"),
    }
    return {
        name: _draw(distribution, tuple(alarmed), label)
        for name, (distribution, alarmed, label) in drawn.items()
        if distribution.num_rows
    }


def _pairs(distribution: Distribution) -> list[tuple[float, float]]:
    return list(itertools.pairwise(distribution.edges))


@functools.lru_cache(maxsize=8)  # a report is written twice, as a page and as an artifact
def _draw(distribution: Distribution, alarmed: tuple[bool, ...], label: str) -> bytes:
    """Bars of equal width a bin, from the first that holds a row to the last, with an empty one at each side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of import, for reports only
    from matplotlib.figure import Figure

    filled = np.flatnonzero(distribution.bins)
    first, last = max(0, int(filled[0]) - 1), min(len(distribution.bins), int(filled[-1]) + 2)
    counts = np.array(distribution.bins[first:last])
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.15, 0.19, 0.83, 0.78))
    colours = [ALARM if alarm else SOUND for alarm in alarmed[first:last]]
    axes.bar(np.arange(len(counts)), counts, width=0.94, align="edge", color=colours)
    _label_bins(axes, distribution, first, last)
    _name_peak(axes, counts, distribution.num_rows)
    axes.set_xlabel(label, color=INK)
    axes.set_ylabel("rows", color=INK)
    _tidy(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _label_bins(axes: Any, distribution: Distribution, first: int, last: int) -> None:
    """Counts are labelled at the bins' edges, ratios at their middles, so that 1 is a label."""
    edges = distribution.edges[first : last + 1]
    if edges[-1] <= _HIGHEST_RATIO_EDGE:
        middles = [round((low + high) / 2, 2) if low else 0.0 for low, high in itertools.pairwise(edges)]
        wanted = [place for place, middle in enumerate(middles) if len(middles) <= _MAX_TICKS or middle * 5 % 1 == 0]
        axes.set_xticks([place + 0.47 for place in wanted], [f"{middles[place]:g}" for place in wanted])
    else:
        step = -(-len(edges) // _MAX_TICKS)
        axes.set_xticks(range(0, len(edges), step), [f"{edge:,.0f}" for edge in edges[::step]])
    axes.set_xlim(-0.3, last - first + 0.3)


def _name_peak(axes: Any, counts: np.ndarray[Any, Any], num_rows: int) -> None:
    peak = int(counts.argmax())
    axes.annotate(
        f"{100 * counts[peak] / num_rows:.0f} %",
        (peak + 0.47, counts[peak]),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        color=INK,
        fontsize=9,
    )
    axes.set_ylim(0, counts[peak] * 1.15)


def _tidy(axes: Any) -> None:
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=0)
