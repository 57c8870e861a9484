"""A folder that the user whom PostgreSQL runs as can reach, or a skip that says why there is none."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.errors import ServiceError
from embedded.postgres import find_programs


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """Pytest's own folders are closed to other users, and root's cluster belongs to another one."""
    try:
        find_programs()
    except ServiceError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(prefix="dflash-pg-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o711)
        yield folder
