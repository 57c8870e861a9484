"""Each stage of the local path beside the limit that it could reach, on one file, in one process without start-up."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiter
import numpy as np

from benchmarks.measure import interleave
from dflash.config import TokenizeOptions
from dflash.data.completions import Completion, read_completions
from dflash.data.plain_rows import PlainRows
from dflash.data.row_plan import RowPlan, plan_row
from dflash.data.shard_job import run_shard_job
from dflash.data.shards import ShardWriter
from dflash.data.spool import LocalInput, ShardJob
from dflash.data.tokenize import tokenize_batch
from dflash.data.tokenizer import TargetTokenizer, load_tokenizer


def measure_stages(batch: Path, tokenizer: Path, repetitions: int) -> list[dict[str, Any]]:
    """Rows of a table: what a stage takes a sample, what its limit takes, and the share of the limit it reaches."""
    path = min(batch.glob("*.jsonl"))
    data = path.read_bytes()
    target = load_tokenizer(tokenizer, probe=False)
    options = TokenizeOptions()
    completions = _completions(path)
    plans = _plans(completions, target, options)
    texts = [segment.text for plan in plans for segment in plan.segments]
    encoder = target.encoder_for(texts).encoder
    rows = tokenize_batch(completions, target, options, encoder).rows
    ids = rows.ids
    with tempfile.TemporaryDirectory() as name:
        work: dict[str, Callable[[], object]] = {
            "parse": lambda: list(read_completions(path, file="a")),
            "parse: limit": lambda: _parse_alone(data),
            "render and split": lambda: _plans(completions, target, options),
            "render and split: limit": lambda: [text + "\n" for text in texts],
            "parse, render and split natively": lambda: _read_rows(path, target, options),
            "parse, render and split natively: limit": lambda: _parse_alone(data),
            "encode, checked": lambda: encoder.encode_batch_flat(texts, allow_special=True),
            "encode, checked: limit": lambda: _unchecked(encoder, texts),
            "write and hash": lambda: _write(Path(name), rows),
            "write and hash: limit": lambda: (hashlib.sha256(ids).digest(), np.copy(ids)),
            "parse to rows": lambda: tokenize_batch(_read_rows(path, target, options), target, options, encoder),
            "parse to rows: limit": lambda: _unchecked(encoder, texts),
            "file to shard": lambda: make_shard(path, Path(name), target, options),
            "file to shard: limit": lambda: _unchecked(encoder, texts),
        }
        costs = interleave({key: _repeat(one) for key, one in work.items()}, repetitions)
    table = []
    for stage in [key for key in work if not key.endswith(": limit")]:
        own, limit = (costs[key].cpu_s / REPEATS / len(completions) * 1e6 for key in (stage, f"{stage}: limit"))
        table.append(
            {
                "stage": stage,
                "us a sample": round(own, 1),
                "limit us": round(limit, 1),
                "of the limit": round(limit / own, 2) if own else 1.0,
                "M tokens/CPU-s": round(len(ids) / len(completions) / own, 2),
            }
        )
    return table


REPEATS = 3


def _repeat(work: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(REPEATS):
            work()

    return repeated


def _completions(path: Path) -> list[Completion]:
    return [entry for entry in read_completions(path, file="a") if isinstance(entry, Completion)]


def _plans(completions: list[Completion], target: TargetTokenizer, options: TokenizeOptions) -> list[RowPlan]:
    return [plan_row(entry, target, options) for entry in completions]


def _parse_alone(data: bytes) -> list[Any]:
    return [jiter.from_json(line) for line in data.splitlines()]


def _read_rows(path: Path, target: TargetTokenizer, options: TokenizeOptions) -> list[Any]:
    """As a process of the pool reads: rows of plain records, by native code where it was compiled."""
    return list(PlainRows(target, options).read(path, file="a"))


def _unchecked(encoder: Any, texts: list[str]) -> object:
    encode = getattr(encoder, "encode_unchecked", encoder.encode_batch_flat)
    return encode(texts, allow_special=True)


def make_shard(path: Path, folder: Path, target: TargetTokenizer, options: TokenizeOptions) -> None:
    """What a process of the pool does, from the downloaded file to the finished shard in the spool."""
    item = LocalInput(path.name, path, path.stat().st_size, None, "0" * 64, is_own=True)
    with tempfile.TemporaryDirectory(dir=folder) as spool:
        run_shard_job(ShardJob("0" * 64, (item,), options, Path(spool)), target)


def _write(folder: Path, rows: Any) -> None:
    with ShardWriter(folder / "shard.arrow", folder / "index.arrow") as writer:
        writer.write(rows)
        writer.close()
