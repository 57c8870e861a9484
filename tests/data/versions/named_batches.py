"""Versions that name a batch folder as it lies there, as the refresh flow leaves them."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash.manifest import InputFile
from dflash.storage import LocalStore, open_store


def publish(sandbox: Any, sample: Any, completions: LocalStore, name: str, content: int, *, num_rows: int = 3) -> None:
    """A version that names the batch folder as it is now.

    Args:
        sandbox: the dataset root with its merging.
        sample: makes a row of an id and a content number.
        completions: where the batch folder is.
        name: of the folder.
        content: number of the first row's content.
        num_rows: in the batch.
    """
    new = sandbox.batch([sample(f"{name}-{n}", content + n) for n in range(num_rows)], name=name)
    inputs = tuple(
        InputFile(key=item.key, size=item.size, etag=item.etag, sha256="0" * 64, num_records=1, num_rejected=0)
        for item in open_store(f"{completions.uri}/{name}").list("")
        if item.key.endswith(".jsonl")
    )
    batch = new.batch.model_copy(update={"source": f"{completions.uri}/{name}/", "inputs": inputs})
    sandbox.merge(dataclasses.replace(new, batch=batch))
