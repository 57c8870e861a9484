"""Memory of the machine, or of the container that this process runs in where that has less."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
# Limit, use, and the name in the statistics for files that are given back when memory is short (kernel docs: cgroup v2
# and v1 memory controllers).
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in all, and bytes that can be had now."""

    total_bytes: int
    available_bytes: int


def host_memory(cgroup: Path = CGROUP) -> HostMemory:
    """Measure; `cgroup` is where the kernel shows the container's own limits."""
    memory = psutil.virtual_memory()
    found = HostMemory(memory.total, memory.available)
    for limit_file, use_file, statistics_file, given_back in _FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / use_file)
        if limit is not None and used is not None and limit < found.total_bytes:
            free = limit - used + _statistic(cgroup / statistics_file, given_back)
            return HostMemory(limit, max(0, min(free, found.available_bytes)))
    return found


def _number(path: Path) -> int | None:
    """What the file says; None where there is none, or no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    value = fields.get(name, "0")
    return int(value) if value.isdecimal() else 0
