"""The users' whole job, S3 in to S3 out, through the real flow from a cold start, against peers and against its limits.

    python benchmarks/full_job.py --install-peers    # once: unpacks SpecForge and datatrove under .dflash/peers
    python benchmarks/full_job.py [--fraction 0.1] [--peer-records 600] [--tokenizer DIR] [--json]

A realistic batch (`benchmarks/corpus.py`: about 2,070 tokens a sample, 500 samples a file, thinking traces, 8 % not in
Latin script) goes to a local S3 server; then the flow `tokenize-completions` runs in a process of its own against a
Prefect server on SQLite. CPU seconds are counted for whole processes, imports and loading included; those of the S3 and
the Prefect server stand apart. Peers and the limits of each stage are measured on a part of the same records
afterwards, interleaved, start-up included for peers (over the part) and not for limits.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402

from benchmarks.corpus import write_batch  # noqa: E402
from benchmarks.measure import machine, measure, print_table  # noqa: E402
from benchmarks.peers import Limit, install_peers, measure_peers  # noqa: E402
from benchmarks.scale import PeakMemory, aws_environment  # noqa: E402
from benchmarks.stages import measure_stages  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.storage import open_store  # noqa: E402
from embedded.prefect_server import temporary_prefect_server  # noqa: E402
from embedded.seaweedfs import SeaweedConfig, SeaweedServer, start_seaweedfs, stop_seaweedfs  # noqa: E402

FULL_SAMPLES, FULL_FILES, SAMPLES_PER_FILE, NUM_SHARDS = 902_087, 1_805, 500, 47
CORPUS_TOKENS = 1_545  # what the corpus takes to make samples of 2,070 tokens
USERS_TOKENS_PER_WORKER_S = 37_500  # 1.87 B tokens in 6.5 minutes on 128 workers
RUN = """
import json, resource, sys
from pathlib import Path
from dflash.config import TokenizeRun
from flows.tokenize_completions import tokenize_completions

result = tokenize_completions(TokenizeRun.model_validate_json(Path(sys.argv[1]).read_text()))
usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(result | {"cpu": [usage.ru_utime + usage.ru_stime for usage in usages]}))
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What one run took: CPU seconds by process, MB by process, the flow's result."""

    result: dict[str, Any]
    wall_s: float
    cpu_s: dict[str, float]
    peak_mb: dict[str, int]

    @property
    def own_cpu_s(self) -> float:
        """CPU seconds of the project's own processes."""
        return self.cpu_s["flow"] + self.cpu_s["tokenizing processes"]


def put_batch(folder: Path, num_files: int, server: SeaweedServer) -> int:
    """Write the batch and send it to the store; returns its bytes."""
    num_bytes = write_batch(folder, num_files, SAMPLES_PER_FILE, CORPUS_TOKENS)
    store = open_store(f"{server.uri}/completions", server.credentials)
    for path in sorted(folder.iterdir()):
        store.put_if_absent(path.name, path)
    return num_bytes


def run_job(num_files: int, tokenizer: Path, folder: Path, server: SeaweedServer, fraction: float) -> Job:
    """Run the flow once in a new process."""
    run = TokenizeRun(
        source=f"{server.uri}/completions",
        dataset=f"{server.uri}/dataset",
        tokenizer=str(tokenizer),
        files_per_shard=max(1, num_files // max(2, round(NUM_SHARDS * fraction))),
        gate=GateThresholds(max_window_cut_share=1.0),
    )
    return run_program(RUN, run, folder, server)


def run_program(program: str, run: TokenizeRun, folder: Path, server: SeaweedServer) -> Job:
    """Run a program that prints the result of a tokenizing run, in a new process.

    Args:
        program: gets the path of the run's parameters; prints what it made and, as `cpu`, its own and its children's
            CPU seconds.
        run: the parameters.
        folder: for the parameters.
        server: the store.
    """
    parameters = folder / "run.json"
    parameters.write_text(run.model_dump_json())
    before = server_cpu_s()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(parameters)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | aws_environment(server) | {"PYTHONPATH": str(REPOSITORY), "DFLASH_HOME": str(folder / "home")},
    )
    memory = PeakMemory(psutil.Process(process.pid))
    output, _ = process.communicate()
    wall_s = time.perf_counter() - start
    memory.stop()
    if process.returncode != 0:
        raise SystemExit("the flow failed, see above")
    result = json.loads(output.splitlines()[-1])
    flow, workers = result.pop("cpu")
    servers = {name: value - before[name] for name, value in server_cpu_s().items()}
    peaks = {"flow": memory.flow_mb, "one tokenizing process": memory.worker_mb, "S3 server": memory.store_mb}
    return Job(
        result,
        wall_s,
        {"flow": flow, "tokenizing processes": workers, **servers},
        {name: round(value) for name, value in peaks.items()},
    )


def read_back(server: SeaweedServer, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of the commands that read the published dataset, each in a new process with an empty cache."""
    dflash = str(Path(sys.executable).with_name("dflash"))
    found = {}
    for name, words in {"verify": ["verify"], "inspect": ["inspect", "--sample", "12345"]}.items():
        environment = os.environ | aws_environment(server) | {"DFLASH_HOME": str(folder / name)}
        command = [dflash, *words, f"{server.uri}/dataset", "--json"]
        cost = measure(
            functools.partial(subprocess.run, command, env=environment, check=True, stdout=subprocess.DEVNULL)
        )
        found[name] = {"wall_s": round(cost.wall_s, 1), "cpu_s": round(cost.cpu_s, 1)}
    return found


def server_cpu_s() -> dict[str, float]:
    """CPU seconds of the servers that this process started."""
    spent = {"S3 server": 0.0, "Prefect server": 0.0}
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        spent["S3 server" if "weed" in process.name() else "Prefect server"] += times.user + times.system
    return spent


def summary(job: Job, num_bytes: int, fraction: float, limits: dict[str, Limit]) -> dict[str, Any]:
    """The figures that the aims are set in."""
    tokens = job.result["tokens"]
    speed = tokens / job.own_cpu_s
    full_tokens = tokens / job.result["rows"] * FULL_SAMPLES
    encoder = limits["encoder alone"].tokens_per_cpu_s
    return {
        "samples": job.result["rows"],
        "tokens": tokens,
        "tokens_per_sample": round(tokens / job.result["rows"]),
        "wall_s": round(job.wall_s, 1),
        "cpu_s": {name: round(value, 1) for name, value in job.cpu_s.items()},
        "peak_mb": job.peak_mb,
        "tokens_per_core_second": round(speed),
        "times_users_worker": round(speed / USERS_TOKENS_PER_WORKER_S),
        "ratio_vs_datasets_map": round(speed / limits["datasets.map"].tokens_per_cpu_s, 1),
        # Like with like: both in one process that has loaded the tokenizer. The job has start-up and transfers in it.
        "ratio_vs_encoder": round(limits["file to shard"].tokens_per_cpu_s / encoder, 3),
        "job_ratio_vs_encoder": round(speed / encoder, 3),
        "full_size_wall_s_at_this_rate": round(job.wall_s / fraction),
        "full_size_core_seconds_at_this_rate": round(full_tokens / speed),
        "bytes_per_token_stored": round(job.result["bytes_uploaded"] / tokens, 2),
        "bytes_moved_over_bytes_of_input_and_output": round(
            (job.result["bytes_downloaded"] + job.result["bytes_uploaded"])
            / (num_bytes + job.result["bytes_uploaded"]),
            3,
        ),
        "machine": machine(),
    }


def main() -> None:
    """Build the batch, run the flow, measure peers and limits, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=0.1, help="of 902,087 samples")
    parser.add_argument("--peer-records", type=int, default=600)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=Path(".dflash/models/qwen3.6-tokenizer"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--install-peers", action="store_true", help="unpack peers under .dflash/peers and stop")
    arguments = parser.parse_args()
    if arguments.install_peers:
        install_peers()
        return
    tokenizer = arguments.tokenizer.resolve()
    num_files = max(2, round(FULL_FILES * arguments.fraction))
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as name, temporary_prefect_server():
        folder = Path(name)
        server = start_seaweedfs(Path(data), SeaweedConfig(attached=True))
        num_bytes = put_batch(folder / "batch", num_files, server)
        job = run_job(num_files, tokenizer, folder, server, arguments.fraction)
        reading = read_back(server, folder)
        stop_seaweedfs(Path(data))
        limits = measure_peers(folder, tokenizer, arguments.peer_records, arguments.repetitions)
        stages = measure_stages(folder / "batch", tokenizer, arguments.repetitions)
    found = summary(job, num_bytes, arguments.fraction, limits) | {"read_back": reading}
    if arguments.json:
        peers = {one: limit.row() for one, limit in limits.items()}
        print(json.dumps(found | {"peers": peers, "stages": stages}, indent=2))
        return
    for key, value in found.items():
        print(f"{key:45} {value}")
    print_table([{"path": one, **limit.row()} for one, limit in limits.items()], as_json=False)
    print_table(stages, as_json=False)


if __name__ == "__main__":
    main()
