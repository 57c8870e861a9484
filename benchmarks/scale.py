"""Many files through the real flow on a real server: nothing lost, memory flat in the number of files.

    python benchmarks/scale.py [--files 200 1805] [--records 500] [--tokenizer DIR] [--json]

Each size runs in a process of its own, against one Prefect server on SQLite, one download task a file. The peak memory
of every process of the run is sampled; `times first` is the largest ratio of such a peak to that of the same kind of
process at the first size, 1 being flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil  # noqa: E402

from benchmarks.measure import print_table  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.storage import open_store  # noqa: E402
from embedded.prefect_server import temporary_prefect_server  # noqa: E402
from embedded.seaweedfs import SeaweedConfig, SeaweedServer, start_seaweedfs, stop_seaweedfs  # noqa: E402


def write_tiny_batch(folder: Path, num_files: int, records_per_file: int) -> None:
    """Files of records of some ten tokens each."""
    folder.mkdir(parents=True)
    for file in range(num_files):
        lines = [
            json.dumps(
                {
                    "id": f"{file}-{record}",
                    "messages": [
                        {"role": "user", "content": f"Add {file} and {record}."},
                        {"role": "assistant", "content": f"{file} + {record} = {file + record}, since {record}."},
                    ],
                }
            )
            for record in range(records_per_file)
        ]
        (folder / f"part-{file:05d}.jsonl").write_text("\n".join(lines) + "\n")


def aws_environment(server: SeaweedServer) -> dict[str, str]:
    """The variables by which a flow's process finds the store."""
    secret = server.credentials.secret_access_key
    return {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.credentials.access_key_id or "",
        "AWS_SECRET_ACCESS_KEY": secret.get_secret_value() if secret else "",
        "PREFECT_LOGGING_LEVEL": "WARNING",
    }


class PeakMemory:
    """Samples the resident memory of the flow's process, its workers, and the servers; keeps the largest of each."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._stop = threading.Event()
        self.flow_mb = self.worker_mb = self.prefect_mb = self.store_mb = 0.0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            self.flow_mb = max(self.flow_mb, _resident_mb(self._process))
            with contextlib.suppress(psutil.Error):
                workers = self._process.children(recursive=True)
                servers = set(psutil.Process().children(recursive=True)) - {self._process, *workers}
                stores = {process for process in servers if "weed" in process.name()}
                self.worker_mb = max(self.worker_mb, *map(_resident_mb, workers), 0.0)
                self.store_mb = max(self.store_mb, *map(_resident_mb, stores), 0.0)
                self.prefect_mb = max(self.prefect_mb, *map(_resident_mb, servers - stores), 0.0)


def _resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 1e6
    except psutil.Error:  # ended since it was listed
        return 0.0


def run_size(num_files: int, records: int, tokenizer: Path, folder: Path, server: SeaweedServer) -> dict[str, Any]:
    """One run of the flow in a process of its own; counts checked against the input."""
    write_tiny_batch(folder / "batch", num_files, records)
    prefix = f"scale-{num_files}"
    store = open_store(f"{server.uri}/{prefix}", server.credentials)
    for path in sorted((folder / "batch").iterdir()):
        store.put_if_absent(path.name, path)
    run = TokenizeRun(
        source=f"{server.uri}/{prefix}",
        dataset=f"{server.uri}/{prefix}-dataset",
        tokenizer=str(tokenizer),
        files_per_download=1,
        gate=GateThresholds(max_single_loss_count_share=1.0),  # made-up answers of one pattern are equally long
    )
    parameters = folder / "run.json"
    parameters.write_text(run.model_dump_json())
    code = (
        "import json; from pathlib import Path; from dflash.config import GateThresholds, TokenizeRun;"
        "from flows.tokenize_completions import tokenize_completions as flow;"
        f"run = TokenizeRun.model_validate_json(Path({str(parameters)!r}).read_text());"
        "print(json.dumps(flow(run)))"
    )
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | aws_environment(server)
    )
    memory = PeakMemory(psutil.Process(process.pid))
    output, _ = process.communicate()
    memory.stop()
    if process.returncode != 0:
        raise SystemExit(f"the flow over {num_files} files failed, see above")
    result = json.loads(output.splitlines()[-1])
    return {
        "files": num_files,
        "rows": result["rows"],
        "lost": num_files * records - result["rows"] - sum(result["rejected"].values()),
        "wall s": round(time.perf_counter() - start, 1),
        "flow peak MB": round(memory.flow_mb),
        "worker peak MB": round(memory.worker_mb),
        "Prefect server peak MB": round(memory.prefect_mb),
        "object store peak MB": round(memory.store_mb),
    }


def flatness(row: dict[str, Any], first: dict[str, Any]) -> float:
    """How many times the memory of the first size the kind of process that grew most takes."""
    ratios: list[float] = [row[name] / max(first[name], 1) for name in row if name.endswith("peak MB")]
    return round(max(ratios), 2)


def main() -> None:
    """Run each size, print the table or, with `--json`, one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, nargs="+", default=[200, 1805])
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--tokenizer", type=Path, default=Path(".dflash/models/smollm2-tokenizer"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as data, temporary_prefect_server():
        server = start_seaweedfs(Path(data), SeaweedConfig(attached=True))
        for num_files in arguments.files:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer = arguments.tokenizer.resolve()
                rows.append(run_size(num_files, arguments.records, tokenizer, Path(folder), server))
        stop_seaweedfs(Path(data))
    print_table([row | {"times first": flatness(row, rows[0])} for row in rows], arguments.json)


if __name__ == "__main__":
    main()
