"""The record of a checkpoint, `checkpoint.json`: read and checked without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dflash.errors import IntegrityError

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.pt"
RECORD: Final = "checkpoint.json"

# What to do about a damaged one.
TAKE_OLDER: Final = "Resume from an older one: move this folder away, then the newest of the others is taken."

_FINISHED: Final = re.compile(r"step-([0-9]{8,})")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_STEP: Final = 2**53  # what JSON readers hold exactly; TensorBoard ends at 2**63
_SECTIONS: Final = {
    **dict.fromkeys(("progress", "config", "drafter", "environment"), (dict,)),
    **dict.fromkeys(("data", "memory"), (dict, type(None))),
    "halved": (bool,),
}


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's folder is named after; None where it isn't named so."""
    match = _FINISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def read_record(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says about itself.

    Raises:
        IntegrityError: it is missing, no record, differs from its digest, or is that of another step than the folder.
    """
    try:
        data = (path / RECORD).read_bytes()
    except OSError as error:
        raise IntegrityError(f"{RECORD} of checkpoint {path} can't be read: {error}. {TAKE_OLDER}") from error
    record = parse_record(data, str(path))
    if step_of(path) not in {None, record["step"]}:
        raise IntegrityError(
            f"{RECORD} of checkpoint {path} is that of step {record['step']}: the folder was renamed, or holds "
            f"another's record. {TAKE_OLDER}"
        )
    return record


def parse_record(data: bytes, where: str) -> dict[str, Any]:
    """Read the content of a `checkpoint.json`.

    Args:
        data: of the file.
        where: which checkpoint, for messages.

    Raises:
        IntegrityError: it is no record, differs from its digest, or holds something else than a run writes.
    """
    try:
        outer = json.loads(data)
        record, expected = outer["record"], outer["sha256"]
        wrong = list(_wrong(record))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{RECORD} of checkpoint {where} can't be read: {error!r}. {TAKE_OLDER}") from error
    if wrong:
        raise IntegrityError(
            f"{RECORD} of checkpoint {where} holds what no run writes: {'; '.join(wrong)}. {TAKE_OLDER}"
        )
    if record_digest(record) != expected:
        raise IntegrityError(f"{RECORD} of checkpoint {where} differs from its digest. {TAKE_OLDER}")
    return dict(record)


def require_sections(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse a record that lacks what is needed of it.

    Raises:
        IntegrityError: names what is missing.
    """
    if missing := [name for name in names if name not in record]:
        raise IntegrityError(f"{RECORD} of checkpoint {where} lacks {', '.join(missing)}. {TAKE_OLDER}")


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over a record in canonical form."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _wrong(record: Mapping[str, Any]) -> Iterator[str]:
    """Say what of a record isn't of its kind; a digest only tells that it is as somebody wrote it."""
    step, files = record["step"], record["files"]
    if type(step) is not int or not 0 <= step <= _MAX_STEP:
        yield f"step {step!r}"
    if not isinstance(files, dict) or not all(_SHA256.fullmatch(str(digest)) for digest in files.values()):
        yield f"files {files!r}, expected a SHA-256 for each name"
    for name, kinds in _SECTIONS.items():
        if name in record and not isinstance(record[name], kinds):
            yield f"{name} {record[name]!r}"
    environment = record.get("environment")
    if isinstance(environment, dict) and not all(isinstance(value, str) for value in environment.values()):
        yield f"environment {environment!r}, expected text for each name"
