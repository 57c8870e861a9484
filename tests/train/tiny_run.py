"""A tiny target on disk, a dataset root of random rows for it, and a run over both."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.config import TokenizeOptions
from dflash.data.dataset import DatasetRoot
from dflash.data.rows import TokenizedRows
from dflash.data.shards import SCHEMA_VERSION, ShardWriter
from dflash.manifest import Counts, Manifest, ShardEntry, TokenizerRecord, sha256_hex
from dflash.storage import S3Credentials

VOCAB = 96
TOKENIZER = TokenizerRecord(name="random", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=VOCAB - 1)


def write_target(folder: Path, vocab_size: int = VOCAB) -> Path:
    """A random Llama with four layers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def publish_rows(
    uri: str,
    work: Path,
    credentials: S3Credentials | None = None,
    *,
    num_shards: int = 3,
    rows_per_shard: int = 6,
    prompt: int = 2,
) -> Manifest:
    """Publish another version of a dataset, with shards of random rows of its own, 8 to 23 tokens with their prompt."""
    root = DatasetRoot.open(uri, credentials, work / "cache")
    pointer = root.pointer()
    version = 1 if pointer is None else pointer.record.version + 1
    parent = None if pointer is None else pointer.record.manifest
    shards = tuple(_put_shard(root, work, (version, shard), rows_per_shard, prompt) for shard in range(num_shards))
    manifest = Manifest(
        version=version,
        parent=parent,
        created_at=datetime(2026, 1, version, tzinfo=UTC),
        schema_version=SCHEMA_VERSION,
        code_version=1,
        tokenizer=TOKENIZER,
        options=TokenizeOptions(max_seq_len=256),
        shards=shards,
        batches=(),
        counts=Counts.of(shards),
        quality={},
    )
    root.publish(manifest, expected=pointer)
    return manifest


def _put_shard(root: DatasetRoot, work: Path, seed: tuple[int, int], num_rows: int, prompt: int) -> ShardEntry:
    g = np.random.default_rng(seed)
    lengths = g.integers(8, 24, num_rows)
    name = "-".join(map(str, seed))
    work.mkdir(parents=True, exist_ok=True)
    shard, index = work / f"{name}.arrow", work / f"{name}.index.arrow"
    rows = TokenizedRows(
        ids=g.integers(1, VOCAB - 1, int(lengths.sum())).astype(np.int32),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        mask=np.concatenate([np.arange(length) >= prompt for length in lengths]),
        sample_ids=[f"{name}-{row}" for row in range(num_rows)],
        sources=["made"] * num_rows,
        num_loss_tokens=np.maximum(lengths - prompt, 0).astype(np.int32),
        output_tokens=(lengths - 2).astype(np.int32),
        finish_reasons=["stop"] * num_rows,
        flags=np.zeros(num_rows, np.uint16),
        scripts=["latin"] * num_rows,
    )
    with ShardWriter(shard, index) as writer:
        writer.write(rows)
        made = writer.close()
    entry = made.entry(sha256_hex(name.encode()), "random")
    root.store.put_if_absent(entry.key, shard, sha256=entry.sha256)
    root.meta.put_if_absent(entry.index_key, index, sha256=entry.index_sha256)
    return entry


def tiny_run(dataset: str, target: Path, output: str, **train: Any) -> dict[str, Any]:
    """Parameters of a run of a few seconds."""
    fields: dict[str, Any] = {
        "pack_tokens": 40,
        "num_anchors": 6,
        "num_epochs": 3,
        "checkpoint_every": 4,
        "drafter": {"num_hidden_layers": 1, "block_size": 4, "target_layer_ids": [0, 2]},
    }
    return {
        "dataset": dataset,
        "target": str(target),
        "output": output,
        "device": "cpu",
        "stop_grace_s": 60,
        "train": fields | train,
    }
