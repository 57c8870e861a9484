"""The drafter under evaluation: a checkpoint, the newest one of a run, or an export; local or on S3."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError

from dflash.errors import IntegrityError, ModelError, ObjectNotFoundError, UsageError
from dflash.eval.config import EXPORT_CONFIG
from dflash.model.drafter import Drafter
from dflash.model.export import drafter_of, load_drafter, read_config
from dflash.model.layout import DrafterConfig
from dflash.storage import S3Credentials, Store, open_store
from dflash.storage.files import (
    file_sha256,
    move_into_place,
    os_errors_as_storage_errors,
    part_path,
    write_part,
)
from dflash.train.checkpoint import load_weights
from dflash.train.checkpoint_record import RECORD, TAKE_OLDER, WEIGHTS, parse_record, read_record, require_sections
from dflash.train.newest import newest_checkpoint
from dflash.validation import problems_of

_MAX_TEXT_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Subject:
    """A drafter on disk.

    Attributes:
        store: where it lies; its evaluation goes there too.
        folder: local files, checked copies where the store is on S3.
        weights_sha256: SHA-256 (hex) of model.safetensors.
        config: its network.
        step: optimiser steps; None for an export.
        record: what the checkpoint says about itself; empty for an export.
    """

    store: Store
    folder: Path
    weights_sha256: str
    config: DrafterConfig
    step: int | None
    record: Mapping[str, Any]

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a checkpoint of a training run."""
        return self.step is not None

    @property
    def target(self) -> str | None:
        """Folder or id of the target as the training named it; None where nobody recorded it."""
        return self._named("target")

    @property
    def dataset(self) -> str | None:
        """Root of the dataset as the training named it; None where nobody recorded it."""
        return self._named("dataset")

    def _named(self, field: str) -> str | None:
        name = (self.record.get("data") or {}).get(field)
        return name if isinstance(name, str) and name else None

    def load(self, dtype: torch.dtype = torch.float32) -> Drafter:
        """Load the network on the CPU.

        Raises:
            IntegrityError: the weights differ from their digest.
            ModelError: they don't fit the configuration, or aren't finite.
        """
        if self.is_checkpoint:
            drafter = drafter_of(load_weights(self.folder), self.config, self.store.uri, dtype=dtype)
        else:
            drafter = load_drafter(self.folder, dtype=dtype)
        # It would be measured as one that never drafts right, or fail in the middle of sampling.
        if bad := [name for name, tensor in drafter.state_dict().items() if not bool(tensor.isfinite().all())]:
            raise ModelError(
                f"{self.store.uri}: {len(bad)} tensors hold values that aren't finite in {dtype}, such as {bad[0]}. "
                "Take an earlier checkpoint."
            )
        return drafter


def open_subject(uri: str, credentials: S3Credentials | None, cache: Path) -> Subject:
    """Find a drafter; on S3 its files are copied into the cache and checked.

    Args:
        uri: a checkpoint, an export, or a run folder, whose newest checkpoint is taken.
        credentials: for S3.
        cache: folder of checked copies.

    Raises:
        UsageError: there is none of these.
        IntegrityError: its files are damaged.
    """
    store = open_store(uri, credentials)
    names = {info.key for info in store.list()}
    if EXPORT_CONFIG in names and RECORD not in names:
        return _export(store, names, cache)
    newest = newest_checkpoint(store.uri, names)
    if newest is not None:
        return _checkpoint(open_store(newest, credentials), cache)
    raise UsageError(
        f"{uri} holds no drafter. Expected a checkpoint ({RECORD}), a run with checkpoints/step-*, or an export "
        f"({EXPORT_CONFIG}); found {', '.join(sorted(names)[:5]) or 'nothing'}."
    )


def _checkpoint(store: Store, cache: Path) -> Subject:
    folder = _local_folder(store, RECORD)
    if folder is None:
        folder = _fetch_checkpoint(store, cache)
    record = read_record(folder)
    require_sections(record, ("drafter",), store.uri)
    if WEIGHTS not in record["files"]:
        raise IntegrityError(f"{RECORD} of checkpoint {store.uri} names no {WEIGHTS}. {TAKE_OLDER}")
    try:
        config = DrafterConfig.model_validate(record["drafter"])
    except ValidationError as error:
        problems = problems_of(error)
        raise IntegrityError(
            f"{RECORD} of checkpoint {store.uri} doesn't describe a drafter: {problems}. {TAKE_OLDER}"
        ) from error
    return Subject(store, folder, record["files"][WEIGHTS], config, record["step"], record)


def _fetch_checkpoint(store: Store, cache: Path) -> Path:
    """Copy record and weights, named as `train.checkpoint_store` does; a copy that was damaged here is made again."""
    data = store.read(RECORD, max_bytes=_MAX_TEXT_BYTES)
    digest = parse_record(data, store.uri)["files"].get(WEIGHTS)
    folder = cache / "checkpoints" / hashlib.sha256(data).hexdigest()
    with os_errors_as_storage_errors(str(folder)):
        part = part_path(folder / RECORD)
        write_part(part, [data])
        move_into_place(part, folder / RECORD)  # in one step: another evaluation may be reading it
        weights = folder / WEIGHTS
        if digest is not None and not (weights.is_file() and file_sha256(weights) == digest):
            store.download(f"{digest}.{WEIGHTS}", weights, sha256=digest)
    return folder


def _export(store: Store, names: set[str], cache: Path) -> Subject:
    folder = _local_folder(store, EXPORT_CONFIG)
    if folder is None:
        wanted = [store.head(name) for name in sorted(names) if name == EXPORT_CONFIG or name.endswith(".safetensors")]
        marks = "\n".join(f"{info.key} {info.size} {info.etag}" for info in wanted)
        folder = cache / "exports" / hashlib.sha256(f"{store.uri}\n{marks}".encode()).hexdigest()
        for info in wanted:
            if not (folder / info.key).is_file():
                store.download(info.key, folder / info.key, expect=info)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ObjectNotFoundError(f"{store.uri}/{WEIGHTS} is missing: the export is not whole.")
    return Subject(store, folder, file_sha256(weights), read_config(folder), None, {})


def _local_folder(store: Store, name: str) -> Path | None:
    path = store.local_path(name)
    return None if path is None else path.parent
