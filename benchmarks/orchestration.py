"""What Prefect costs the whole job: the flow against the same steps as plain library calls, on as many files.

    python benchmarks/orchestration.py [--files 1805] [--job-cpu-s S] [--json]

Each file holds a few tiny records, so that next to nothing but the steps around tokenizing is left: as many download
tasks and shards as at full size. Both run from a cold start, S3 in and S3 out; the Prefect server's CPU seconds count
as orchestration, and so does the report with its pictures, which only the flow makes. Given the CPU seconds of a whole
job (`full_size_core_seconds_at_this_rate` of full_job.py), the share of it is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.full_job import FULL_FILES, RUN, run_program  # noqa: E402
from benchmarks.measure import machine, print_table  # noqa: E402
from benchmarks.scale import write_tiny_batch  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.storage import open_store  # noqa: E402
from embedded.prefect_server import temporary_prefect_server  # noqa: E402
from embedded.seaweedfs import SeaweedConfig, start_seaweedfs, stop_seaweedfs  # noqa: E402

RECORDS_PER_FILE = 2
LIBRARY = """
import json, os, resource, sys
from pathlib import Path
from dflash.config import TokenizeRun
from dflash.data.tokenize_run import tokenize_dataset
from dflash.data.without_pandas import start_arrow
from dflash.data.workspace import Workspace
from dflash.storage import S3Credentials

start_arrow()
home, keys = Path(os.environ["DFLASH_HOME"]), ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
credentials = S3Credentials(**{key.lower(): os.environ[f"AWS_{key}"] for key in keys})
run = TokenizeRun.model_validate_json(Path(sys.argv[1]).read_text())
manifest = tokenize_dataset(run, credentials, Workspace(home / "work", home / "cache"))
usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"rows": manifest.counts.num_rows, "cpu": [usage.ru_utime + usage.ru_stime for usage in usages]}))
"""


def main() -> None:
    """Run both, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=FULL_FILES)
    parser.add_argument("--job-cpu-s", type=float, help="CPU seconds of the whole job, to print the share of it")
    parser.add_argument("--tokenizer", type=Path, default=Path(".dflash/models/qwen3.6-tokenizer"))
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = compare(arguments.files, arguments.tokenizer.resolve())
    flow, library = (sum(row[name] for name in ("flow", "tokenizing processes", "Prefect server")) for row in rows)
    found: dict[str, Any] = {"orchestration_cpu_s": round(flow - library, 1), "machine": machine()}
    if arguments.job_cpu_s:
        found["share_of_the_job"] = round((flow - library) / arguments.job_cpu_s, 3)
    if arguments.json:
        print(json.dumps(found | {"rows": rows}, indent=2))
        return
    print_table(rows, as_json=False)
    print(found)


def compare(num_files: int, tokenizer: Path) -> list[dict[str, Any]]:
    """CPU seconds of the flow and of the library's steps, by process."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as name, temporary_prefect_server():
        folder = Path(name)
        server = start_seaweedfs(Path(data), SeaweedConfig(attached=True))
        write_tiny_batch(folder / "batch", num_files, RECORDS_PER_FILE)
        store = open_store(f"{server.uri}/completions", server.credentials)
        for path in sorted((folder / "batch").iterdir()):
            store.put_if_absent(path.name, path)
        for kind, program in {"flow": RUN, "library": LIBRARY}.items():
            run = TokenizeRun(
                source=f"{server.uri}/completions",
                dataset=f"{server.uri}/{kind}",
                tokenizer=str(tokenizer),
                gate=GateThresholds(max_single_loss_count_share=1.0, max_tiny_mask_share=1.0),
            )
            job = run_program(program, run, folder, server)
            rows.append({"steps by": kind, "rows": job.result["rows"], "wall_s": round(job.wall_s, 1), **job.cpu_s})
        stop_seaweedfs(Path(data))
    return rows


if __name__ == "__main__":
    main()
