"""Requests a second, memory and the price of faults of `dflash generate`, against a stub server as its own process.

    python benchmarks/generate.py [--prompts 10000] [--json]

Rows: `instant` against a server that answers at once (the client is the bottleneck); `slots` and `slots, faulty`
against one that works on 32 requests at a time (the server is), without and with 5 % resets, 2 % 429, 1 % hangs, 1 %
truncated JSON and 0.5 % empty answers. A faulty request takes its slot as well, so 9.5 % of the server's time is lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose tokenize.py hides Python's own

import argparse  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402

from benchmarks.measure import machine  # noqa: E402
from dflash.generate.config import GenerateRun  # noqa: E402
from dflash.generate.progress import GenerateProgress  # noqa: E402
from dflash.generate.session import GenerateSession  # noqa: E402

STUB = Path(__file__).resolve().parents[1] / "tests" / "generate" / "stub_server.py"
SLOTS = ("--slots", "32", "--service-s", "0.1")  # 320 requests a second at most
MIN_PER_S = 500.0
MIN_FAULTY_RATIO = 0.85
MAX_GROWTH_MB = 64.0


def main() -> None:
    """Print a row for each server, and whether the limits hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    cases = {"instant": (), "slots": SLOTS, "slots, faulty": (*SLOTS, "--faulty")}
    rows = {name: run_case(chosen.prompts, options) for name, options in cases.items()}
    ratio = rows["slots, faulty"]["records_per_s"] / rows["slots"]["records_per_s"]
    limits = {
        f"instant: at least {MIN_PER_S:g} records/s": rows["instant"]["records_per_s"] >= MIN_PER_S,
        f"faulty / fault-free at least {MIN_FAULTY_RATIO}": ratio >= MIN_FAULTY_RATIO,
        "no failure after retries": all(row["failed"] == 0 for row in rows.values()),
        f"memory grows by less than {MAX_GROWTH_MB:g} MB": all(
            row["growth_mb"] < MAX_GROWTH_MB for row in rows.values()
        ),
    }
    if chosen.json:
        print(json.dumps({"machine": machine(), "rows": rows, "faulty_ratio": round(ratio, 3), "limits": limits}))
        return
    print(machine())
    for name, row in rows.items():
        print(f"{name:>14}  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"faulty / fault-free: {ratio:.2f}")
    for limit, holds in limits.items():
        print(f"{'ok  ' if holds else 'FAIL'} {limit}")


def run_case(num_prompts: int, options: tuple[str, ...]) -> dict[str, Any]:
    """One run into a new folder."""
    with tempfile.TemporaryDirectory() as name, stub(options) as url:
        folder = Path(name)
        lines = (
            json.dumps({"id": f"q{number}", "messages": [{"role": "user", "content": f"question {number} " * 10}]})
            for number in range(num_prompts)
        )
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        run = GenerateRun(
            prompts=str(folder / "prompts.jsonl"),
            batch=str(folder / "batch"),
            endpoints=(url,),
            request_timeout_s=1,
            max_attempts=10,
            max_in_flight=96,
        )
        memory = Memory(num_prompts)
        with GenerateSession(run, None, folder / "work", listener=memory) as session:
            session.plan()
            cpu, start = time.process_time(), time.perf_counter()
            outcome = session.finish(session.generate())
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        ids = [json.loads(line)["id"] for part in (folder / "batch").glob("*.jsonl") for line in part.open()]
        assert sorted(ids) == sorted(f"q{number}" for number in range(num_prompts)), "each id once"
    return {
        "records_per_s": round(num_prompts / seconds, 1),
        "cpu_ms_per_record": round(1000 * cpu / num_prompts, 3),
        "tries": outcome.tries,
        "failed": outcome.num_failed,
        "peak_mb": round(memory.peak_mb, 1),
        "growth_mb": round(memory.growth_mb, 1),
    }


class Memory:
    """Resident memory while a run goes on: its peak, and its growth behind the first fifth of the records."""

    def __init__(self, num_prompts: int) -> None:
        self.peak_mb = 0.0
        self._first_mb = 0.0
        self._num_prompts = num_prompts

    def __call__(self, progress: GenerateProgress) -> None:
        """Sample."""
        now_mb = psutil.Process().memory_info().rss / 2**20
        self.peak_mb = max(self.peak_mb, now_mb)
        if not self._first_mb and progress.num_new >= self._num_prompts / 5:
            self._first_mb = now_mb

    @property
    def growth_mb(self) -> float:
        """Peak behind the first fifth, against what it was there."""
        return self.peak_mb - self._first_mb if self._first_mb else 0.0


@contextmanager
def stub(options: tuple[str, ...]) -> Iterator[str]:
    """The stub server's base URL."""
    with subprocess.Popen([sys.executable, STUB, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
