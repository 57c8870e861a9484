"""Checkpoints of a run on S3, whole or absent.

```
<output>/checkpoints/step-00001000/
    <sha256>.model.safetensors, <sha256>.optimizer.pt, <sha256>.metrics.jsonl     named after their content
    checkpoint.json                                                                written last, removed first
```
A step counts once its `checkpoint.json` is there. The names by content make an upload that is repeated with other bytes
(a step that was trained again after a crash) impossible to mix up with what the first one left.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.data.copying import put_current
from dflash.data.version_shards import sha256_of
from dflash.errors import IntegrityError, ObjectNotFoundError
from dflash.storage import Store
from dflash.train.checkpoint import RECORD, read_record
from dflash.train.curves import METRICS, metrics_until

_STEP = re.compile(r"step-(\d{8,})/checkpoint\.json")


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one run on a store.

    Attributes:
        store: rooted at `<output>/checkpoints`.
        keep: how many of the newest stay.
    """

    store: Store
    keep: int

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        found = (_STEP.fullmatch(info.key) for info in self.store.list())
        return sorted(int(match[1]) for match in found if match)

    def upload(self, path: Path) -> None:
        """Upload a local checkpoint and the metrics up to it, then remove the oldest ones and what has no record.

        Raises:
            StorageError: the store failed; an upload that is cut leaves no checkpoint.
        """
        record = read_record(path)
        folder = _folder(record["step"])
        for name, sha256 in record["files"].items():
            self.store.put_if_absent(f"{folder}/{sha256}.{name}", path / name, sha256=sha256)
        self._put_metrics(path, record["step"], folder)
        put_current(self.store, f"{folder}/{RECORD}", (path / RECORD).read_bytes())
        self._prune(record)

    def fetch(self, step: int, folder: Path) -> Path:
        """Download a checkpoint into `folder`, as the loop writes it; return its path.

        Raises:
            IntegrityError: a part of it is missing or damaged.
        """
        final, building = folder / f"step-{step:08d}", folder / f".fetching-{step:08d}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        try:
            self.store.download(f"{_folder(step)}/{RECORD}", building / RECORD)
            for name, sha256 in read_record(building)["files"].items():
                self.store.download(f"{_folder(step)}/{sha256}.{name}", building / name, sha256=sha256)
        except ObjectNotFoundError as error:
            raise IntegrityError(
                f"Checkpoint {step} of {self.store.uri} isn't whole: {error}. Resume from an older one: remove its "
                f"{RECORD}."
            ) from error
        building.rename(final)
        return final

    def fetch_metrics(self, step: int, run_dir: Path) -> None:
        """Download the metrics up to a step, where there are any."""
        for info in self.store.list(_folder(step)):
            if info.key.endswith(METRICS):
                run_dir.mkdir(parents=True, exist_ok=True)
                sha256 = info.key.rpartition("/")[2].partition(".")[0]
                self.store.download(info.key, run_dir / METRICS, sha256=sha256)

    def _put_metrics(self, path: Path, step: int, folder: str) -> None:
        lines = metrics_until(path.parents[1], step)
        if lines:
            data = "".join(json.dumps(row) + "\n" for row in lines).encode()
            part = path.parents[1] / f".metrics-{step:08d}"
            part.write_bytes(data)
            self.store.put_if_absent(f"{folder}/{sha256_of(part)}.{METRICS}", data)
            part.unlink()

    def _prune(self, newest: dict[str, Any]) -> None:
        """Remove old checkpoints, record first, and the leftovers of uploads that were cut or repeated."""
        kept = {_folder(step) for step in self.steps()[-self.keep :]} | {_folder(newest["step"])}
        keys = [info.key for info in self.store.list()]
        old = [key for key in keys if key.partition("/")[0] not in kept]
        self.store.delete([key for key in old if key.endswith(RECORD)])
        self.store.delete([key for key in old if not key.endswith(RECORD)])


def _folder(step: int) -> str:
    return f"step-{step:08d}"
