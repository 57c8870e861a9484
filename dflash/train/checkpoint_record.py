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
        raise IntegrityError(
            f"{RECORD} of checkpoint {path} can't be read: {error!r}. Resume from an older one."
        ) from error
    if not whole or record_digest(record) != expected:
        raise IntegrityError(f"{RECORD} of checkpoint {path} differs from its digest. Resume from an older one.")
    return dict(record)


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over a record in canonical form."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
