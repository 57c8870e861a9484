"""Builds a directory that is either whole or absent, whatever dies and whoever else builds it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from dflash.errors import ModelError


def build_once(directory: Path, names: Iterable[str], build: Callable[[Path], None]) -> Path:
    """Fills a directory if it isn't there yet.

    The work happens in a temporary directory beside it, which is then renamed. When two processes do
    this at once, the first rename wins and the other result is thrown away.

    Args:
        directory: where the files shall lie; its parents are made.
        names: the files that `build` writes; a directory that has them all is complete.
        build: writes those files into the empty directory that it is given.

    Returns:
        `directory`.

    Raises:
        ModelError: something else lies at `directory`.
    """
    wanted = sorted(names)
    if is_complete(directory, wanted):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The outer directory is private by nature; the inner one gets the usual permissions.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as outer:
        built = Path(outer) / "built"
        built.mkdir()
        build(built)
        try:
            os.rename(built, directory)  # noqa: PTH104 - replaces an empty directory, as rename(2) says
        except OSError as error:
            if not is_complete(directory, wanted):
                found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else "a file"
                raise ModelError(
                    f"{directory} can't be built: expected nothing or {wanted} there, found {found}; "
                    f"move it away or choose another directory"
                ) from error
    return directory


def is_complete(directory: Path, names: Iterable[str]) -> bool:
    """Says whether every file is there. A partial one can't be: directories appear whole."""
    return all((directory / name).is_file() for name in names)
