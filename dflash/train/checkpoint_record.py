"""The record of a checkpoint, `checkpoint.json`: read and checked without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dflash.errors import IntegrityError

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.pt"
RECORD: Final = "checkpoint.json"

# What to do about a damaged one.
TAKE_OLDER: Final = "Resume from an older one: move this folder away, then the newest of the others is taken."


def read_record(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says about itself.

    Raises:
        IntegrityError: it is missing, no record, or differs from its digest.
    """
    try:
        outer = json.loads((path / RECORD).read_text(encoding="utf-8"))
        record, expected = outer["record"], outer["sha256"]
        whole = isinstance(record["files"], dict) and isinstance(record["step"], int)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{RECORD} of checkpoint {path} can't be read: {error!r}. {TAKE_OLDER}") from error
    if not whole or record_digest(record) != expected:
        raise IntegrityError(f"{RECORD} of checkpoint {path} differs from its digest. {TAKE_OLDER}")
    return dict(record)


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over a record in canonical form."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
