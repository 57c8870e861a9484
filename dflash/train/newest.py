"""Find the newest checkpoint of a run, wherever it lies."""

from __future__ import annotations

import re
from typing import Any, Final

from dflash.errors import UsageError
from dflash.storage import S3Credentials, open_store
from dflash.train.checkpoint_record import RECORD, parse_record

_STEP: Final = re.compile(r"(?:.*/)?step-([0-9]{8,})/" + re.escape(RECORD))
_MAX_BYTES: Final = 256 << 20


def newest_checkpoint(uri: str, keys: set[str]) -> str | None:
    """URI of the checkpoint at `uri`, or of the newest one below it, by the keys that a store has there."""
    if RECORD in keys:
        return uri.rstrip("/")
    steps = [(int(match.group(1)), key) for key in keys if (match := _STEP.fullmatch(key))]
    if not steps:
        return None
    return f"{uri.rstrip('/')}/{max(steps)[1].removesuffix('/' + RECORD)}"


def newest_record(uri: str, credentials: S3Credentials | None) -> tuple[str, dict[str, Any]]:
    """URI and record of a checkpoint, or of the newest one of a run.

    Raises:
        UsageError: there is none.
        IntegrityError: its record is damaged.
    """
    store = open_store(uri, credentials)
    found = newest_checkpoint(store.uri, {info.key for info in store.list()})
    if found is None:
        raise UsageError(f"{uri} holds no checkpoint. Expected {RECORD} there, or a run with checkpoints/step-*.")
    data = open_store(found, credentials).read(RECORD, max_bytes=_MAX_BYTES)
    return found, parse_record(data, found)
