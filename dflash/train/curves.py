"""The metrics of a run as they lie in its folder, and the picture of them; read without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS, PICTURE = "metrics.jsonl", "curves.png"
_CURVES = (("loss", "loss"), ("accuracy", "share of slots right"), ("learning_rate", "learning rate"))
_MAX_POINTS = 2000
_MAX_STEP, _MAX_VALUE = 2**53, 1e300


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read a run's metrics; a last line that a crash cut is left out, and so are damaged ones."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    rows = map(_row, path.read_bytes().split(b"\n")[:-1])
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """One line's numbers; None where it is damaged: a power cut leaves zeros, and no run shall end by its curves."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= _MAX_STEP:
        return None
    values = [row.get(name) for name, _ in _CURVES]
    return row if all(value is None or _can_be_drawn(value) for value in values) else None


def _can_be_drawn(value: Any) -> bool:
    return type(value) in {int, float} and abs(value) < _MAX_VALUE  # false for NaN, too


def metrics_until(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Read the metrics of the steps up to one."""
    return [row for row in read_metrics(run_dir) if row["step"] <= step]


class MetricsTail:
    """Reads what a running trainer has written since the last look.

    Args:
        run_dir: of the run; the file may not be there yet, and a resumed run puts another in its place.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._offset = self._inode = 0

    def newest(self) -> dict[str, Any] | None:
        """Return the last whole line since the last call; None where there is none."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._offset, self._inode = 0, inode
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines()
        return _row(lines[-1]) if lines else None


def describe_step(row: dict[str, Any]) -> str:
    """One line about a step's metrics."""
    loss = "none" if row["loss"] is None else f"{row['loss']:.3f}"
    line = f"epoch {row['epoch']}, loss {loss}, accuracy {row['accuracy']:.3f}, {row['seconds']:.0f} s"
    if "peak_bytes" not in row:
        return line
    return f"{line}, memory {row['peak_bytes'] / 1e9:.1f} of {row['planned_bytes'] / 1e9:.1f} GB planned"


def plot_metrics(run_dir: Path, picture: Path) -> None:
    """Draw loss, accuracy and learning rate over the steps into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    rows = rows[:: 1 + len(rows) // _MAX_POINTS]
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(1, len(_CURVES)), _CURVES, strict=True):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1)
        axes.set_xlabel("step")
        axes.set_title(label)
        axes.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
