"""CPU seconds of this process and its children, interleaved repetitions, medians, and the machine's name."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """What one repetition took: wall and CPU (user + system, children included) seconds."""

    wall_s: float
    cpu_s: float


def measure(work: Callable[[], object]) -> Cost:
    """Run once; children count when they have ended."""
    before, start = _cpu_s(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - start, _cpu_s() - before)


def interleave(candidates: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, Cost]:
    """Run all candidates in turn, `repetitions` times; the medians, so that a slow minute hits all alike."""
    costs: dict[str, list[Cost]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, work in candidates.items():
            costs[name].append(measure(work))
    return {
        name: Cost(statistics.median(c.wall_s for c in runs), statistics.median(c.cpu_s for c in runs))
        for name, runs in costs.items()
    }


def machine() -> str:
    """Processor model and cores, for the table's caption."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else platform.processor()}, {cores} cores, Python {platform.python_version()}"


def print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows of one shape as a table, or as JSON."""
    if as_json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print(machine())
    names = list(rows[0])
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(str(row[name]).rjust(width) for name, width in zip(names, widths, strict=True)))


def _cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
