"""Prompts of evaluations, read from a folder of JSON Lines, to look for them in training rows."""

from __future__ import annotations

import json
from typing import Any, Final

from dflash.errors import UsageError
from dflash.storage import Store

FIELDS: Final = ("prompt", "question", "problem", "instruction")
MAX_FILE_BYTES: Final = 1 << 30


def read_prompts(store: Store) -> list[str]:
    """All prompts below a store: one of `FIELDS` as text, or the user turns of `messages`.

    Raises:
        UsageError: no file, or a line that isn't such a record; names it.
    """
    files = [item for item in store.list("") if item.key.endswith(".jsonl")]
    prompts = []
    for item in files:
        data = store.read(item.key, expect=item, max_bytes=MAX_FILE_BYTES)
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                prompts += _texts(line, f"{store.uri}/{item.key}:{number}")
    if not prompts:
        raise UsageError(f"No evaluation prompts under {store.uri}: expected .jsonl files, found {len(files)}.")
    return prompts


def _texts(line: bytes, where: str) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    if isinstance(record, dict):
        texts = [record[name] for name in FIELDS if isinstance(record.get(name), str)]
        texts += _user_turns(record.get("messages"))
        if texts:
            return texts
    raise UsageError(f"{where}: expected an object with one of {', '.join(FIELDS)} as text, or messages.")


def _user_turns(messages: Any) -> list[str]:
    if not isinstance(messages, list):
        return []
    turns = [turn for turn in messages if isinstance(turn, dict) and turn.get("role") == "user"]
    return [turn["content"] for turn in turns if isinstance(turn.get("content"), str)]
