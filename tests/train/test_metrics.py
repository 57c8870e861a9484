from __future__ import annotations

from pathlib import Path

import pytest

from dflash.train.curves import METRICS, MetricsTail, plot_metrics, read_metrics
from dflash.train.metrics import MetricsWriter


def write(run_dir: Path, first: int, last: int, loss: float) -> None:
    writer = MetricsWriter(run_dir, first - 1)
    for step in range(first, last + 1):
        writer.write({"step": step, "loss": loss})
    writer.close()


def test_a_resumed_run_replaces_the_steps_behind_its_checkpoint_and_who_reads_along_sees_it(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.newest() is None
    write(tmp_path, 1, 5, 0.5)
    assert tail.newest() == {"step": 5, "loss": 0.5}
    assert tail.newest() is None
    write(tmp_path, 4, 9, 0.123456789)  # longer than what was read, with other line ends
    assert tail.newest() == {"step": 9, "loss": 0.123456789}
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 10))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 10, "lo')
    assert tail.newest() is None
    assert not (tmp_path / "metrics.part").exists()


UNDRAWABLE = ('"x"', "[]", "NaN", "1e999", "1" + "0" * 4000, "true")


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": true}', '{"step": -1}', '{"step": 1' + "0" * 4000 + "}"),
        *(f'{{"step": 1, "loss": {value}}}' for value in UNDRAWABLE),
    ],
)
def test_lines_that_can_not_be_drawn_end_no_run(tmp_path: Path, line: str) -> None:
    (tmp_path / METRICS).write_text(f'{line}\n{{"step": 2, "loss": 1.5, "accuracy": null}}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [2]
    plot_metrics(tmp_path, tmp_path / "curves.png")


def test_damaged_lines_end_no_run(tmp_path: Path) -> None:
    damaged = b'{"step": 1}\n\0\0\0\n\xff\n[1]\n{"loss": 1}\n{"step": "x"}\n' + b"[" * 100_000 + b"\n"
    (tmp_path / METRICS).write_bytes(damaged + b'{"step": 2}\n{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    write(tmp_path, 3, 4, 0.5)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    tail = MetricsTail(tmp_path)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b"\0\0\n")
    assert tail.newest() is None
