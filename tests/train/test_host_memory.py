"""A container's own limit counts where the machine has more."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dflash.train.host_memory import host_memory


@pytest.mark.parametrize(
    ("limit", "use", "statistics", "name"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_a_container_has_what_it_was_given(tmp_path: Path, limit: str, use: str, statistics: str, name: str) -> None:
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / use).write_text("700000\n")
    (tmp_path / statistics).write_text(f"anon 600000\n{name} 50000\n")
    found = host_memory(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (1_000_000, 350_000)


@pytest.mark.parametrize("limit", ["max\n", str(2**63 - 4096), None], ids=["v2", "v1", "no cgroup"])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("700000\n")
    assert host_memory(tmp_path).total_bytes == psutil.virtual_memory().total
