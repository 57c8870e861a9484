"""The long jobs that faults are tried on: tokenize, merge, train. Each knows its middle, and what it must leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import MergeRun, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.tokenize_run import tokenize_dataset
from dflash.data.verify import verify_dataset
from dflash.data.workspace import Workspace
from dflash.storage import S3Credentials, open_store
from dflash.train.checkpoint_store import CheckpointStore
from dflash.train.curves import MetricsTail
from dflash.train.launch import run_dir_of
from tests.flows.small_runs import small_run
from tests.train.tiny_run import publish_rows, tiny_run

NUM_FILES = 8
NUM_BASE_ROWS = 9
ROWS_A_FILE = 250
NUM_STEPS = 800


@dataclass(frozen=True, slots=True)
class FaultJob:
    """One long job.

    Attributes:
        deployment: its name.
        function: module and name of its flow, and of the class of its parameters.
        config: its parameters, as JSON.
        is_midway: whether it is well under way and not done, given the DFLASH_HOME of its process.
        check: fails unless all that it should have made is there, once.
    """

    deployment: str
    function: tuple[str, str, str]
    config: dict[str, Any]
    is_midway: Callable[[Path], bool]
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Makes jobs, each with inputs and outputs of its own.

    Attributes:
        base: URI below which everything is put.
        credentials: of the store, as they are now.
        records: real completions.
        tokenizer: folder of the tokenizer.
        target: folder of a small target.
        folder: a working folder.
    """

    base: str
    credentials: S3Credentials
    records: list[dict[str, Any]]
    tokenizer: Path
    target: Path
    folder: Path

    def make(self, stage: str) -> FaultJob:
        """A job of a stage."""
        return {"tokenize": self._tokenize, "merge": self._merge, "train": self._train}[stage]()

    def _run(self, name: str, files: dict[str, list[dict[str, Any]]]) -> TokenizeRun:
        run = small_run(f"{self.base}/{name}", f"{self.base}/train", self.tokenizer)
        store = open_store(run.source, self.credentials)
        for key, rows in files.items():
            store.put_if_absent(key, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return run

    def _batch(self) -> TokenizeRun:
        files = {
            f"part-{number:05d}.jsonl": [
                _with_prompt_of_its_own(self.records[row % 40], f"row-{number}-{row}") for row in range(ROWS_A_FILE)
            ]
            for number in range(NUM_FILES)
        }
        return self._run("batch", files)

    def _tokenize(self) -> FaultJob:
        run = self._batch()
        return FaultJob(
            "tokenize-completions",
            ("flows.tokenize_completions", "tokenize_completions", "TokenizeRun"),
            run.model_dump(mode="json"),
            _two_new_shards(),
            lambda: self._check_rows(NUM_FILES * ROWS_A_FILE, version=1),
        )

    def _merge(self) -> FaultJob:
        first = self._run("first", {"part-0.jsonl": self.records[50 : 50 + NUM_BASE_ROWS]})
        tokenize_dataset(first, self.credentials, Workspace(self.folder / "first", self.folder / "cache"))
        run = MergeRun(batch=self._batch())
        return FaultJob(
            "merge-dataset",
            ("flows.merge_dataset", "merge_dataset", "MergeRun"),
            run.model_dump(mode="json"),
            _two_new_shards(),
            lambda: self._check_rows(NUM_FILES * ROWS_A_FILE + NUM_BASE_ROWS, version=2),
        )

    def _train(self) -> FaultJob:
        publish_rows(f"{self.base}/rows", self.folder / "made", self.credentials)
        output = f"{self.base}/run"
        config = tiny_run(
            f"{self.base}/rows", self.target, output, num_epochs=10_000, max_steps=NUM_STEPS, checkpoint_every=100
        )

        def is_midway(home: Path) -> bool:
            row = MetricsTail(run_dir_of(output, home / "work")).newest()
            return row is not None and row["step"] > 120

        return FaultJob(
            "train-online", ("flows.train_online", "train_online", "TrainRun"), config, is_midway, self._check_training
        )

    def _check_rows(self, num_rows: int, version: int) -> None:
        root = DatasetRoot.open(f"{self.base}/train", self.credentials)
        manifest = root.current()
        assert manifest is not None
        assert (manifest.version, manifest.counts.num_rows) == (version, num_rows)
        report = verify_dataset(root, manifest)
        assert report.to_json()["problems"] == [], report.describe()

    def _check_training(self) -> None:
        store = open_store(f"{self.base}/run", self.credentials)
        rows = [json.loads(line) for line in store.read("metrics.jsonl").splitlines()]
        assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
        checkpoints = CheckpointStore(open_store(f"{self.base}/run/checkpoints", self.credentials), keep=3)
        assert checkpoints.steps()[-1] == NUM_STEPS


def _with_prompt_of_its_own(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The record under another id and with another prompt, so that it repeats no other; its ids are no longer true."""
    kept = {key: value for key, value in record.items() if not key.endswith("_token_ids")}
    first, *rest = record["messages"]
    return kept | {"id": name, "messages": [first | {"content": f"{name}: {first['content']}"}, *rest]}


def _two_new_shards() -> Callable[[Path], bool]:
    """Whether two shards were spooled since the first call."""
    before: set[Path] | None = None

    def look(home: Path) -> bool:
        nonlocal before
        spooled = {path for path in (home / "work" / "spool").glob("*/*") if not path.name.startswith(".")}
        if before is None:
            before = spooled
        return len(spooled - before) >= 2

    return look
