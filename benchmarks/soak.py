"""The whole loop under random kills: what it makes has to be what an undisturbed loop makes.

    python benchmarks/soak.py [--minutes 20] [--seed 0] [--json]

A stack of its own is started in a temporary folder. One round without faults generates answers, tokenizes a batch,
merges a second and trains a drafter; then rounds with faults follow until the minutes are over. A fault kills or stops
some process of the stack at a random moment: one of a flow run, a whole worker, the Prefect server, the object store or
the model's server. It is repaired as a person would, by `dflash up`; a run that ended is retried. After each round the
dataset is verified, its shards and the training losses are compared with those of the first round, and every prompt has
to have its one answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import tomllib  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import Any  # noqa: E402
from urllib.parse import urlsplit  # noqa: E402

import psutil  # noqa: E402

from benchmarks.measure import machine, print_table  # noqa: E402
from dflash.config import GateThresholds, MergeRun, RunModel, TokenizeRun  # noqa: E402
from dflash.data.completions import Completion, read_completions  # noqa: E402
from dflash.data.dataset import DatasetRoot  # noqa: E402
from dflash.data.verify import verify_dataset  # noqa: E402
from dflash.errors import DflashError, ServiceError  # noqa: E402
from dflash.generate.config import GenerateRun, SamplingOptions  # noqa: E402
from dflash.runs import TrainRun  # noqa: E402
from dflash.storage import open_store  # noqa: E402
from embedded import stack as stacks  # noqa: E402
from embedded.model_server import start_model_server  # noqa: E402
from embedded.prefect_api import LocalPrefectApi  # noqa: E402
from embedded.processes import find_free_ports  # noqa: E402
from embedded.smollm2 import ensure_smollm2  # noqa: E402
from embedded.stack import StackConnection  # noqa: E402
from embedded.stack_state import StackFolder  # noqa: E402

EXAMPLES = REPOSITORY / "examples" / "completions"
MODEL = REPOSITORY / ".dflash" / "models" / "smollm2"
RECIPE = REPOSITORY / "deployments" / "runs" / "smollm2-demo.toml"
NUM_PROMPTS, MAX_TOKENS = 24, 32
NUM_STEPS, CHECKPOINT_EVERY = 24, 4
STAGE_LIMIT_S = 900.0
ENDED_BADLY = ("FAILED", "CRASHED", "CANCELLED")


@dataclass(slots=True)
class ModelServer:
    """`dflash serve` of the small target on a port that stays the same."""

    folder: Path
    port: int = field(default_factory=lambda: find_free_ports(1)[0])
    process: subprocess.Popen[str] | None = None
    url: str = ""

    def ensure(self) -> None:
        """Start it unless it runs, and wait until it answers."""
        if self.process is not None and self.process.poll() is None:
            return
        self.url, self.process = start_model_server(MODEL, self.folder / "serve.log", port=self.port)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)


class Faults:
    """Strikes at random moments while it is entered, and repairs; what it did is in `struck`."""

    def __init__(self, stack: StackConnection, model: ModelServer, rng: random.Random) -> None:
        self.struck: list[str] = []
        self._stack, self._model, self._rng = stack, model, rng
        self._over = threading.Event()
        self._kinds: dict[str, Callable[[], None]] = {
            "process of a run": self._kill_process_of_a_run,
            "worker with all it runs": self._kill_worker,
            "Prefect server": lambda: self._kill_part("prefect-server"),
            "object store": lambda: _signal(self._store_pid(), signal.SIGKILL),
            "object store stopped for 8 s": self._stop_store,
            "model server": self._kill_model,
        }

    def run(self, limit: int) -> None:
        """Strike up to `limit` times, until `end`."""
        for _ in range(limit):
            if self._over.wait(self._rng.uniform(4, 20)):
                return
            kind = self._rng.choice(list(self._kinds))
            with contextlib.suppress(psutil.Error, FileNotFoundError, LookupError):
                self._kinds[kind]()
                self.struck.append(kind)
            time.sleep(self._rng.uniform(0, 4))
            self.repair()

    def repair(self) -> None:
        """What a person does in the morning: `dflash up`."""
        for _ in range(3):
            with contextlib.suppress(ServiceError):
                stacks.up(self._stack.project, _silent)
                break
        self._model.ensure()

    def end(self) -> None:
        """Strike no more."""
        self._over.set()

    def _kill_process_of_a_run(self) -> None:
        workers = [self._part(f"worker-{pool}") for pool in ("cpu", "b200")]
        below = [process for worker in workers for process in worker.children(recursive=True)]
        _signal(self._rng.choice(below).pid, signal.SIGKILL)

    def _kill_worker(self) -> None:
        worker = self._part(f"worker-{self._rng.choice(('cpu', 'b200'))}")
        for process in (worker, *worker.children(recursive=True)):
            _signal(process.pid, signal.SIGKILL)

    def _kill_part(self, name: str) -> None:
        _signal(self._part(name).pid, signal.SIGKILL)

    def _stop_store(self) -> None:
        pid = self._store_pid()
        _signal(pid, signal.SIGSTOP)
        time.sleep(8)
        _signal(pid, signal.SIGCONT)

    def _kill_model(self) -> None:
        if self._model.process is not None:
            self._model.process.kill()
            self._model.process.wait()

    def _part(self, name: str) -> psutil.Process:
        state = StackFolder(self._stack.project).read()
        assert state is not None
        return psutil.Process(state.processes[name].pid)

    def _store_pid(self) -> int:
        return int(json.loads((self._stack.project / ".dflash" / "s3" / "weed.pid").read_text())["pid"])


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _silent(_: str) -> None:
    return None


@dataclass(slots=True)
class Round:
    """One pass through the loop.

    Attributes:
        faults: what struck, by kind.
        retries: presses on Retry that it took.
        made: what has to be equal in all rounds.
    """

    number: int
    faults: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    seconds: float = 0.0
    made: dict[str, Any] = field(default_factory=dict)


class Loop:
    """Runs rounds on a stack."""

    def __init__(self, stack: StackConnection, model: ModelServer, seed: int, faults_a_stage: int) -> None:
        self._stack, self._model, self._seed, self._limit = stack, model, seed, faults_a_stage
        port = urlsplit(stack.prefect_api_url).port
        assert port is not None
        self._api = LocalPrefectApi(port)
        self._inputs = f"s3://{stack.bucket}/soak/inputs"
        for place, part in enumerate(sorted(EXAMPLES.glob("part-*.jsonl"))[:4]):
            open_store(f"{self._inputs}/{'first' if place < 2 else 'second'}", stack.s3).put_if_absent(part.name, part)

    def run(self, number: int, *, faults: bool) -> Round:
        """One round; its outputs lie below a prefix of its own."""
        done, began = Round(number), time.monotonic()
        base = f"s3://{self._stack.bucket}/soak/round-{number}"
        for name, (deployment, config) in self._stages(base).items():
            self._stage(done, f"{number}/{name}", deployment, config, faults=faults)
        done.made = self._made(base)
        done.seconds = round(time.monotonic() - began, 1)
        return done

    def _stages(self, base: str) -> dict[str, tuple[str, RunModel]]:
        prompts = self._stack.project / "prompts.jsonl"
        lines = (EXAMPLES / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        prompts.write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
        generate = GenerateRun(
            prompts=str(prompts),
            batch=f"{base}/generated",
            endpoints=(self._model.url,),
            sampling=SamplingOptions(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        gate = GateThresholds(max_length_cut_share=1.0, max_single_loss_count_share=1.0, max_tiny_mask_share=0.5)
        first = TokenizeRun(
            source=f"{self._inputs}/first",
            dataset=f"{base}/dataset",
            tokenizer=str(MODEL),
            gate=gate,
            files_per_shard=1,
        )
        second = first.model_copy(update={"source": f"{self._inputs}/second"})
        recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["train"]
        del recipe["max_seconds"], recipe["replay"]
        recipe |= {"max_steps": NUM_STEPS, "checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2}
        train = {"dataset": f"{base}/dataset", "target": str(MODEL), "output": f"{base}/drafter", "train": recipe}
        return {
            "generate": ("generate-completions", generate),
            "tokenize": ("tokenize-completions", first),
            "merge": ("merge-dataset", MergeRun(batch=second)),
            "train": ("train-online", TrainRun.model_validate(train)),
        }

    def _stage(self, done: Round, key: str, deployment: str, config: RunModel, *, faults: bool) -> None:
        """Start a deployment once, strike while it runs, retry until it has completed."""
        (found,) = self._post("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
        parameters = {"config": config.model_dump(mode="json")}
        started = self._post(
            f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters, "idempotency_key": key}
        )
        striking = Faults(self._stack, self._model, random.Random(f"{self._seed}/{key}"))
        thread = threading.Thread(target=striking.run, args=(self._limit if faults else 0,))
        thread.start()
        try:
            done.retries += self._until_completed(started["id"], key)
        finally:
            striking.end()
            thread.join()
        done.faults.update(striking.struck)
        sys.stderr.write(f"{key}: {', '.join(striking.struck) or 'undisturbed'}; {done.retries} retries so far\n")

    def _until_completed(self, flow_run: str, key: str) -> int:
        """Wait and press Retry; returns how often.

        Raises:
            ServiceError: it did not complete in time.
        """
        deadline, retries = time.monotonic() + STAGE_LIMIT_S, 0
        while time.monotonic() < deadline:
            time.sleep(0.5)
            with contextlib.suppress(ServiceError):  # the server may be the one that was struck
                state = self._api.get(f"/flow_runs/{flow_run}")["state"]
                if state["type"] == "COMPLETED":
                    return retries
                if state["type"] in ENDED_BADLY:
                    again = {"type": "SCHEDULED", "name": "AwaitingRetry"}
                    answer = self._api.post(f"/flow_runs/{flow_run}/set_state", {"state": again})
                    retries += answer["status"] == "ACCEPT"
        raise ServiceError(f"{key} did not complete within {STAGE_LIMIT_S:.0f} s: {state}")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        for _ in range(20):
            with contextlib.suppress(ServiceError):
                return self._api.post(path, body)
            time.sleep(3)
        return self._api.post(path, body)

    def _made(self, base: str) -> dict[str, Any]:
        """Shards, losses and answers of a round; the dataset is verified by reading all of it."""
        stacks.up(self._stack.project, _silent)
        root = DatasetRoot.open(f"{base}/dataset", self._stack.s3)
        manifest = root.current()
        assert manifest is not None
        report = verify_dataset(root, manifest)
        if report.to_json()["problems"]:
            raise DflashError(f"{base}/dataset: {report.describe()}")
        store = open_store(f"{base}/drafter", self._stack.s3)
        metrics = [json.loads(line) for line in store.read("metrics.jsonl").splitlines()]
        return {
            "version": manifest.version,
            "rows": manifest.counts.num_rows,
            "shards": [entry.sha256 for entry in manifest.shards],
            "losses": [[row["step"], row["loss"]] for row in metrics],
            "answers": sorted(self._answers(f"{base}/generated")),
        }

    def _answers(self, batch: str) -> Iterator[tuple[str, str]]:
        """Id and answer of every record of a batch; a repeated id shows as a longer list."""
        store = open_store(batch, self._stack.s3)
        with tempfile.TemporaryDirectory() as folder:
            for info in store.list(""):
                if info.key.endswith(".jsonl") and not info.key.startswith("_"):
                    path = Path(folder) / "part.jsonl"
                    store.download(info.key, path)
                    for entry in read_completions(path, file=info.key):
                        assert isinstance(entry, Completion), entry
                        yield entry.sample_id, str(entry.messages[-1]["content"])


def main() -> None:
    """Run rounds until the time is over; exit with 1 if one made something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults-a-stage", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    ensure_smollm2(MODEL)
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory(prefix="dflash-soak-") as name:
        project = Path(name)
        model = ModelServer(project)
        try:
            stacks.up(project, _silent)
            model.ensure()
            loop = Loop(stacks.connect(project), model, arguments.seed, arguments.faults_a_stage)
            rounds = [loop.run(0, faults=False)]
            while time.monotonic() < deadline:
                rounds.append(loop.run(len(rounds), faults=True))
        finally:
            model.stop()
            stacks.down(project, _silent)
    table = [_row(one, rounds[0].made) for one in rounds]
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "machine": machine(), "rounds": table}, indent=2))
    else:
        print_table(table, as_json=False)
    if not all(row["equal"] for row in table):
        raise SystemExit(1)


def _row(one: Round, undisturbed: dict[str, Any]) -> dict[str, Any]:
    different = [name for name in undisturbed if one.made[name] != undisturbed[name]]
    return {
        "round": one.number,
        "seconds": one.seconds,
        "faults": sum(one.faults.values()),
        "kinds": dict(sorted(one.faults.items())),
        "retries": one.retries,
        "rows": one.made["rows"],
        "steps": len(one.made["losses"]),
        "answers": len(one.made["answers"]),
        "equal": not different,
        "different": different,
    }


if __name__ == "__main__":
    main()
