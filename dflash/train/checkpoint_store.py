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

from dflash.data.copying import put_current
from dflash.errors import IntegrityError, ObjectNotFoundError
from dflash.manifest import sha256_hex
from dflash.storage import Store
from dflash.train.checkpoint_record import OPTIMIZER, RECORD, WEIGHTS, read_record
from dflash.train.curves import METRICS, metrics_until

_STEP = re.compile(r"step-([0-9]{8,})/checkpoint\.json")
_BY_CONTENT = re.compile(r"/[0-9a-f]{64}\.[^/]+$")


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
        keys = {f"{folder}/{sha256}.{name}" for name, sha256 in record["files"].items()}
        for name, sha256 in record["files"].items():
            self.store.put_if_absent(f"{folder}/{sha256}.{name}", path / name, sha256=sha256)
        rows = metrics_until(path.parents[1], record["step"])
        metrics = "".join(json.dumps(row) + "\n" for row in rows).encode()
        keys.add(f"{folder}/{sha256_hex(metrics)}.{METRICS}")
        self.store.put_if_absent(f"{folder}/{sha256_hex(metrics)}.{METRICS}", metrics)
        put_current(self.store, f"{folder}/{RECORD}", (path / RECORD).read_bytes())
        self._prune(folder, keys)

    def fetch(self, step: int, folder: Path) -> Path:
        """Download a checkpoint into `folder`, as the loop writes it; return its path.

        Raises:
            IntegrityError: a part of it is missing or damaged, or it names other files.
        """
        final, building = folder / f"step-{step:08d}", folder / f".fetching-{step:08d}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        try:
            self.store.download(f"{_folder(step)}/{RECORD}", building / RECORD)
            files = read_record(building)["files"]
            if set(files) != {WEIGHTS, OPTIMIZER}:  # before they become paths
                raise IntegrityError(
                    f"Checkpoint {step} of {self.store.uri} names the files {sorted(files)}, expected {WEIGHTS} and "
                    f"{OPTIMIZER}. Resume from an older one: remove its {RECORD}."
                )
            for name, sha256 in files.items():
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
            if info.key.endswith(f".{METRICS}") and _BY_CONTENT.search(info.key):
                run_dir.mkdir(parents=True, exist_ok=True)
                sha256 = info.key.rpartition("/")[2].partition(".")[0]
                self.store.download(info.key, run_dir / METRICS, sha256=sha256)

    def _prune(self, newest: str, keys: set[str]) -> None:
        """Remove old checkpoints, record first, and the leftovers of uploads that were cut or repeated.

        What isn't named after its content stays with its step: the evaluation lies there too.
        """
        kept = {_folder(step) for step in self.steps()[-self.keep :]} | {newest}
        found = [(info.key, info.key.partition("/")[0]) for info in self.store.list()]
        old = [key for key, folder in found if folder not in kept]
        old += [key for key, folder in found if folder == newest and _BY_CONTENT.search(key) and key not in keys]
        self.store.delete([key for key in old if key.endswith(RECORD)])
        self.store.delete([key for key in old if not key.endswith(RECORD)])


def _folder(step: int) -> str:
    return f"step-{step:08d}"
