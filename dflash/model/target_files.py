"""Which target this is, told by its files without reading all of them; needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from dflash.errors import ModelError

_WEIGHTS: Final = ("*.safetensors", "*.bin")
_BLOCKS, _BLOCK_BYTES = 16, 1 << 20

# What saving a configuration again changes although the model stays the same.
_NOT_THE_MODEL: Final = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})


def target_fingerprint(target: str) -> str:
    """Fingerprint of a target's weights and configuration.

    Of a folder: SHA-256 over config.json and, for each file of weights, its name, its size and 16 MiB of it, the start
    with the table of its tensors among them. Fine-tuning changes every tensor, so it shows; a change of a few bytes of
    one tensor may not. Of a hub id: the commit, which names all bytes.

    Args:
        target: folder or id, whose configuration has been read already.

    Returns:
        `files:` or `commit:` and hex digits.

    Raises:
        ModelError: a file can't be read.
    """
    folder = Path(target)
    if not folder.is_dir():
        return f"commit:{_cached_commit(target)}"
    found = hashlib.sha256()
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
        found.update(json.dumps(kept, sort_keys=True).encode())
        for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
            _add_file(found, path)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"The files of the target {target} can't be read: {error}.") from error
    return f"files:{found.hexdigest()}"


def _add_file(found: Any, path: Path) -> None:
    size = path.stat().st_size
    found.update(f"\n{path.name} {size}\n".encode())
    last = max(0, size - _BLOCK_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            file.seek(start)
            found.update(file.read(_BLOCK_BYTES))


def _cached_commit(target: str) -> str:
    """Commit of the copy that is cached here; its folder is named by it."""
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(target, "config.json", local_files_only=True)
    except OSError as error:
        raise ModelError(f"The target {target} is neither a folder nor in the cache of the hub: {error}") from error
    return Path(str(config)).parent.name
