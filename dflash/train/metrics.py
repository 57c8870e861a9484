"""One line of metrics for each step: JSON Lines for programs, TensorBoard for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dflash.train.curves import METRICS, metrics_until


class MetricsWriter:
    """Writes a run's metrics; a resumed run goes on where its checkpoint was.

    Args:
        run_dir: holds `metrics.jsonl` and `tensorboard/`.
        step: steps done; later lines, written before a crash, are dropped, so that no step appears twice.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._path = run_dir / METRICS
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = metrics_until(run_dir, step)
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        part.replace(self._path)  # in one step: a kill loses no history, and who reads along sees another file
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
