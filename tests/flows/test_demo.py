"""What the demo decides and keeps; the demo itself is the whole path, run by `make demo`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from dflash.config import TokenizeOptions, TokenizeRun
from dflash.errors import UsageError
from dflash.manifest import (
    Counts,
    InputFile,
    Manifest,
    ShardEntry,
    ShardReceipt,
    TokenizerRecord,
    batch_from_receipts,
    sha256_hex,
)
from dflash.storage import open_store
from embedded.stack import StackConnection
from flows import demo, demo_steps

if TYPE_CHECKING:
    from embedded.seaweedfs import SeaweedServer


def write_parts(folder: Path, *contents: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number, content in enumerate(contents):
        (folder / f"part-{number:05d}.jsonl").write_text(content)
    return demo_steps.list_examples(folder)


def make_manifest() -> Manifest:
    entry = ShardEntry(
        sha256=sha256_hex(b"shard"),
        num_bytes=1000,
        num_rows=10,
        num_tokens=300,
        num_loss_tokens=200,
        index_sha256=sha256_hex(b"index"),
        index_bytes=300,
        fingerprint=sha256_hex(b"fingerprint"),
        encoder="huggingface",
    )
    file = InputFile(key="part.jsonl", size=5, etag=None, sha256=sha256_hex(b"in"), num_records=10, num_rejected=0)
    receipt = ShardReceipt(shard=entry, inputs=(file,), reject_reasons={}, rejects_sha256=None)
    return Manifest(
        version=1,
        parent=None,
        created_at=datetime(2026, 11, 30, tzinfo=UTC),
        schema_version=1,
        code_version=1,
        tokenizer=TokenizerRecord(name="t", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=1000),
        options=TokenizeOptions(),
        shards=(entry,),
        batches=(batch_from_receipts("s3://bucket/batch", [receipt]),),
        counts=Counts.of([entry]),
        quality={"passed": True},
    )


def test_prefix_is_kept_until_files_or_code_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(tmp_path / "parts", "a", "b")
    first = demo_steps.inputs_prefix("datasets/demo", parts)
    prefix, _, digest = first.rpartition("-")
    assert prefix == "datasets/demo"
    assert len(bytes.fromhex(digest)) == 6
    assert demo_steps.inputs_prefix("datasets/demo", parts) == first
    seen = {first, demo_steps.inputs_prefix("datasets/demo", parts[:1])}
    seen.add(demo_steps.inputs_prefix("datasets/demo", write_parts(tmp_path / "parts", "a", "c")))
    monkeypatch.setattr(demo_steps, "CODE_VERSION", demo_steps.CODE_VERSION + 1)
    seen.add(demo_steps.inputs_prefix("datasets/demo", parts))
    assert len(seen) == 4


def test_changed_examples_are_put_beside_the_old_ones(tmp_path: Path, s3_server: SeaweedServer) -> None:
    stack = StackConnection("", s3_server.credentials, s3_server.bucket, tmp_path, tmp_path)
    parts = write_parts(tmp_path / "parts", "a", "b")
    old = demo_steps.put_files(stack, "completions/examples", parts)
    assert demo_steps.put_files(stack, "completions/examples", parts) == old
    new = demo_steps.put_files(stack, "completions/examples", write_parts(tmp_path / "parts", "a", "changed"))
    found = [open_store(uri, stack.s3).read("part-00001.jsonl") for uri in (old, new)]
    assert found == [b"b", b"changed"]


def test_without_examples_it_says_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="from a checkout"):
        demo_steps.list_examples(tmp_path)


@pytest.mark.parametrize("conversations", [None, {"rows": 100}])
def test_numbers_are_kept_in_demo_json(tmp_path: Path, conversations: dict[str, int] | None) -> None:
    from flows.tokenize_completions import summary

    (tmp_path / ".dflash").mkdir()
    state = demo_steps.Demo(tmp_path, Console(quiet=True))
    with state.step("up"):
        pass
    with state.step("tokenize"):
        pass
    run = TokenizeRun(source="s3://b/completions", dataset="s3://b/datasets/demo", tokenizer="t")
    result = summary(make_manifest(), run, 1.5)
    demo.write_summary(tmp_path, demo.summarize(state, result, "demo-quality.html", conversations))
    kept = json.loads((tmp_path / ".dflash" / "demo.json").read_text())
    required = {"rows": 10, "tokens": 300, "loss_tokens": 200, "version": 1, "dataset": "s3://b/datasets/demo"}
    assert {name: kept[name] for name in required} == required
    assert set(kept["seconds"]) == {"up", "tokenize"}
    assert all(value >= 0 for value in kept["seconds"].values())
    assert kept.get("real_conversations") == conversations
