"""One line of metrics for each step: JSON Lines for programs, TensorBoard for people, a picture for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
_CURVES = (("loss", "loss"), ("accuracy", "share of slots right"), ("learning_rate", "learning rate"))


class MetricsWriter:
    """Writes a run's metrics; a resumed run goes on where its checkpoint was.

    Args:
        run_dir: holds `metrics.jsonl` and `tensorboard/`.
        step: steps done; later lines, written before a crash, are dropped, so that no step appears twice.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._path = run_dir / METRICS
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(run_dir) if row["step"] <= step]
        self._path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one step's numbers at once, so that a killed run keeps them."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read a run's metrics; a last line that a crash cut is left out."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def plot_metrics(run_dir: Path, picture: Path) -> None:
    """Draw loss, accuracy and learning rate over the steps into a PNG."""
    rows = read_metrics(run_dir)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(_CURVES)), _CURVES, strict=True):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1)
        axes.set_xlabel("step")
        axes.set_title(label)
        axes.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
