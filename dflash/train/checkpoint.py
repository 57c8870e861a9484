"""Checkpoints that are whole or absent, verified on load.

```
<run>/checkpoints/step-00001000/
    model.safetensors     the drafter's fp32 master weights
    optimizer.pt          optimiser and generator state, kept rows of replay (read with weights_only=True)
    checkpoint.json       step, place in the data, configs, environment, SHA-256 of these two and of itself
```
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import IntegrityError, StorageError, TrainingError
from dflash.storage.files import file_sha256, sync_path
from dflash.train.checkpoint_record import (
    OPTIMIZER,
    RECORD,
    TAKE_OLDER,
    WEIGHTS,
    read_record,
    record_digest,
    step_of,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds.

    Attributes:
        step: optimiser steps done.
        weights: the drafter's state dict on the CPU.
        optimizer: anything that `torch.load(weights_only=True)` can read back.
        record: JSON: place in the data, configs, environment, counters.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    record: Mapping[str, Any]


@dataclass(slots=True)
class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        folder: where they lie.
        keep: how many of the newest stay.
        upload: called in a background thread with each finished checkpoint; its error is raised by the next `save` or
            by `close`. A checkpoint that is being uploaded isn't removed.
    """

    folder: Path
    keep: int = 3
    upload: Callable[[Path], None] | None = None
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _uploads: dict[Path, Future[None]] = field(default_factory=dict, init=False)

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, start its upload and remove the oldest ones.

        Raises:
            StorageError: the disk is full or failed; checkpoints before this one are whole.
            TrainingError: an earlier upload failed; the checkpoint is written all the same, so no step is lost.
        """
        final = self.folder / f"step-{snapshot.step:08d}"
        is_new = not final.exists()
        if is_new:
            self._write(snapshot, final)
        self._collect(wait=False)
        if is_new:
            self._start_upload(final)
            self._prune()
        return final

    def _write(self, snapshot: Snapshot, final: Path) -> None:
        building = self.folder / f".building-{snapshot.step:08d}"
        shutil.rmtree(building, ignore_errors=True)
        try:
            self._build(snapshot, building)
            building.rename(final)
            sync_path(self.folder)
        except (OSError, SafetensorError, RuntimeError) as error:  # each writer has its own error for a full disk
            shutil.rmtree(building, ignore_errors=True)
            raise StorageError(
                f"Checkpoint {final} can't be written: {error}. Those before it are whole: free the disk, then start "
                "the run again, which goes on from the newest one."
            ) from error

    def _build(self, snapshot: Snapshot, building: Path) -> None:
        building.mkdir(parents=True)
        save_file({name: value.contiguous() for name, value in snapshot.weights.items()}, building / WEIGHTS)
        torch.save(dict(snapshot.optimizer), building / OPTIMIZER)
        files = {name: _sha256(building / name) for name in (WEIGHTS, OPTIMIZER)}
        record = {**snapshot.record, "step": snapshot.step, "files": files}
        text = json.dumps({"sha256": record_digest(record), "record": record}, indent=1, sort_keys=True)
        (building / RECORD).write_text(text + "\n", encoding="utf-8")
        for path in (building / WEIGHTS, building / OPTIMIZER, building / RECORD, building):
            sync_path(path)

    def paths(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        found = ((step_of(path), path) for path in self.folder.glob("step-*"))
        return [path for _, path in sorted((step, path) for step, path in found if step is not None)]

    def latest(self) -> Path | None:
        """Return the newest finished checkpoint."""
        return next(reversed(self.paths()), None)

    def close(self) -> None:
        """Wait for the uploads.

        Raises:
            TrainingError: one failed.
        """
        try:
            self._collect(wait=True)
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def _start_upload(self, path: Path) -> None:
        if self.upload is None:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._uploads[path] = self._pool.submit(self.upload, path)

    def _collect(self, *, wait: bool) -> None:
        for path in [path for path, upload in self._uploads.items() if wait or upload.done()]:
            error = self._uploads.pop(path).exception()
            if error is not None:
                raise TrainingError(
                    f"The upload of checkpoint {path} failed: {error}. The local copy is whole; "
                    "repair the store and resume from it."
                ) from error

    def _prune(self) -> None:
        for path in self.paths()[: -self.keep]:
            if path not in self._uploads:
                shutil.rmtree(path)


def load(path: Path) -> Snapshot:
    """Read a checkpoint and check every byte of it.

    Raises:
        IntegrityError: a file is missing, differs from its digest, or can't be read.
    """
    record = read_record(path)
    _check_files(path, record, (WEIGHTS, OPTIMIZER))
    return Snapshot(record["step"], _tensors(path / WEIGHTS), _state(path / OPTIMIZER), record)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read only the drafter's weights of a checkpoint and check them; the optimiser's state may be absent.

    Raises:
        IntegrityError: the record or the weights are missing or differ from their digest.
    """
    _check_files(path, read_record(path), (WEIGHTS,))
    return _tensors(path / WEIGHTS)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} is no file of weights: {error}. {TAKE_OLDER}") from error


def _state(path: Path) -> dict[str, Any]:
    try:
        grows = _inflation(path)
        state = grows or torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle and torch; a file that fits its digest may still be another's
        raise IntegrityError(f"{path} is no state of an optimiser: {type(error).__name__}. {TAKE_OLDER}") from error
    if not isinstance(state, dict) or not isinstance(state.get("optimizer", {}), dict):
        raise IntegrityError(f"{path} is no state of an optimiser: {grows or type(state).__name__}. {TAKE_OLDER}")
    return state


def _inflation(path: Path) -> str | None:
    """Say how a file would take more memory than it has bytes: torch writes its parts as they are, one by one."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    if packed := [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]:
        return f"{len(packed)} of its parts are compressed, such as {packed[0][:80]!r}"
    size, within = sum(part.file_size for part in parts), path.stat().st_size
    return f"its parts have {size} bytes and it has {within}" if size > within else None


def _check_files(path: Path, record: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        expected, found = record["files"].get(name), _sha256(path / name)
        if expected != found:
            raise IntegrityError(
                f"{name} of checkpoint {path} has SHA-256 {found}, its record says {expected}. {TAKE_OLDER}"
            )


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise IntegrityError(f"{path} can't be read: {error}. {TAKE_OLDER}") from error
