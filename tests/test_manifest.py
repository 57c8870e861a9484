from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash.config import TokenizeOptions
from dflash.errors import DatasetError
from dflash.manifest import (
    Batch,
    Counts,
    InputFile,
    Manifest,
    PointerMove,
    PointerRecord,
    ShardEntry,
    ShardReceipt,
    TokenizerRecord,
    batch_from_receipts,
    canonical_json,
    fingerprint_of,
    sha256_hex,
)

A_PATH = "../" * 8 + "home/user/other"
DAY = datetime(2026, 11, 30, 12, tzinfo=UTC)


def make_entry(number: int, rows: int = 10) -> ShardEntry:
    return ShardEntry(
        sha256=sha256_hex(b"shard %d" % number),
        num_bytes=1000 + number,
        num_rows=rows,
        num_tokens=rows * 100,
        num_loss_tokens=rows * 60,
        index_sha256=sha256_hex(b"index %d" % number),
        index_bytes=300,
        fingerprint=sha256_hex(b"fingerprint %d" % number),
        encoder="huggingface",
    )


def make_receipt(number: int, reasons: dict[str, int] | None = None) -> ShardReceipt:
    reasons = reasons or {}
    rejected = sum(reasons.values())
    return ShardReceipt(
        shard=make_entry(number),
        inputs=(
            InputFile(
                key=f"part-{number}.jsonl",
                size=5,
                etag=None,
                sha256=sha256_hex(b"in %d" % number),
                num_records=10 + rejected,
                num_rejected=rejected,
            ),
        ),
        reject_reasons=reasons,
        rejects_sha256=sha256_hex(b"rejects %d" % number) if reasons else None,
    )


def make_manifest(**changes: Any) -> Manifest:
    shards = changes.pop("shards", (make_entry(0), make_entry(1)))
    values: dict[str, Any] = {
        "version": 1,
        "parent": None,
        "created_at": DAY,
        "schema_version": 1,
        "code_version": 1,
        "tokenizer": TokenizerRecord(name="t", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=248_077),
        "options": TokenizeOptions(),
        "shards": shards,
        "batches": (batch_from_receipts("s3://bucket/batch", [make_receipt(0), make_receipt(1)]),),
        "counts": Counts.of(shards),
        "quality": {"passed": True},
    }
    return Manifest(**(values | changes))


def test_canonical_bytes_are_sorted_compact_and_end_in_one_newline() -> None:
    data = make_manifest().to_bytes()
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1
    document = json.loads(data)
    assert list(document) == sorted(document)
    assert data == json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def test_bytes_round_trip() -> None:
    manifest = make_manifest(notes={"स्रोत": ["漢字", 1, None]}, gate_override_reason="for a trial run")
    again = Manifest.from_bytes(manifest.to_bytes(), "there")
    assert again == manifest
    assert again.to_bytes() == manifest.to_bytes()
    assert "漢字".encode() in manifest.to_bytes()


def test_the_digest_leaves_out_when_and_nothing_else() -> None:
    manifest = make_manifest()
    assert make_manifest(created_at=datetime(2027, 1, 1, tzinfo=UTC)).digest == manifest.digest
    others = [
        make_manifest(shards=(make_entry(1), make_entry(0))),
        make_manifest(options=TokenizeOptions(max_seq_len=4096)),
        make_manifest(quality={"passed": False}),
        make_manifest(version=2, parent=manifest.name),
        make_manifest(gate_override_reason="for a trial run"),
        make_manifest(batches=()),
    ]
    digests = {item.digest for item in others}
    assert len(digests) == len(others)
    assert manifest.digest not in digests


def test_name_and_key_hold_version_and_digest() -> None:
    manifest = make_manifest(version=12, parent="v000011-000000000000")
    assert manifest.name == f"v000012-{manifest.digest[:12]}"
    assert manifest.key == f"manifests/{manifest.name}.json"
    assert manifest.shards[0].key == f"shards/{manifest.shards[0].sha256}.arrow"
    assert manifest.shards[0].index_key == f"index/{manifest.shards[0].index_sha256}.arrow"


def test_counts_must_be_the_sums_over_the_shards() -> None:
    manifest = make_manifest()
    assert manifest.counts == Counts(num_shards=2, num_rows=20, num_tokens=2000, num_loss_tokens=1200, num_bytes=2001)
    wrong = manifest.counts.model_copy(update={"num_rows": 21})
    with pytest.raises(ValidationError, match="differ from the sum over the shards"):
        make_manifest(counts=wrong)


def test_no_shard_may_be_named_twice() -> None:
    with pytest.raises(ValidationError, match="named twice"):
        make_manifest(shards=(make_entry(0), make_entry(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"version": 0}, "version: Input should be greater"),
        ({"format_version": 2}, "format_version: Input should be 1"),
        ({"shards": "none"}, "shards: Input should be a valid"),
        ({"created_at": "yesterday"}, "created_at: "),
    ],
)
def test_a_document_that_is_not_one_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    document = json.loads(make_manifest().to_bytes()) | change
    with pytest.raises(DatasetError, match=message) as caught:
        Manifest.from_bytes(canonical_json(document), "s3://bucket/root/manifests/v1.json")
    assert "s3://bucket/root/manifests/v1.json is not a valid Manifest" in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_dataset_error(data: bytes) -> None:
    with pytest.raises(DatasetError, match="not a valid PointerRecord"):
        PointerRecord.from_bytes(data, "state.json")


def test_a_pointer_record_keeps_its_history() -> None:
    moves = tuple(PointerMove(manifest=f"v00000{n}-aa", version=n, at=DAY, action="publish") for n in (1, 2))
    record = PointerRecord(manifest="v000002-aa", manifest_sha256="0" * 64, version=2, history=moves)
    assert PointerRecord.from_bytes(record.to_bytes(), "there") == record


def test_a_batch_sums_its_receipts_in_shard_order() -> None:
    receipts = [
        make_receipt(0, {"bad_json": 2}),
        make_receipt(1),
        make_receipt(2, {"bad_json": 1, "empty_response": 4}),
    ]
    batch = batch_from_receipts("s3://bucket/batch", receipts)
    assert batch.reject_reasons == {"bad_json": 3, "empty_response": 4}
    assert (batch.num_shards, batch.num_rows) == (3, 30)
    assert batch.rejects == (receipts[0].rejects_sha256, receipts[2].rejects_sha256)
    assert [item.key for item in batch.inputs] == ["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"]
    assert receipts[2].num_records == 15
    assert receipts[2].key == f"receipts/{receipts[2].shard.fingerprint}.json"
    assert batch_from_receipts("elsewhere", receipts).fingerprint == batch.fingerprint
    assert batch_from_receipts("s3://bucket/batch", receipts[::-1]).fingerprint != batch.fingerprint


def test_contracts_are_frozen() -> None:
    batch = Batch(source="s", fingerprint="f" * 64, inputs=(), num_shards=0, num_rows=0)
    with pytest.raises(ValidationError, match="frozen"):
        batch.num_rows = 5  # type: ignore[misc]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_fingerprints_ignore_the_order_of_parts(parts: dict[str, Any]) -> None:
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))
    assert json.loads(canonical_json(parts)) == parts
    assert fingerprint_of({**parts, "one more part": 1}) != fingerprint_of(parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_json_form_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})


def test_parts_without_a_stable_form_are_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        fingerprint_of({"path": object()})


@pytest.mark.parametrize("digest", [A_PATH, "", "A" * 64, "0" * 63, "0" * 64 + "\n", "0" * 64 + "/../../x"])
def test_a_digest_that_could_be_a_path_is_refused(digest: str) -> None:
    """Digests become names of files: a copy that doesn't fit its digest is removed."""
    entry = make_entry(1).model_dump(mode="json")
    for name in ("sha256", "index_sha256", "fingerprint"):
        with pytest.raises(DatasetError, match=name):
            ShardEntry.from_bytes(canonical_json(entry | {name: digest}), "a manifest")
    receipt = make_receipt(1).model_dump(mode="json")
    with pytest.raises(DatasetError, match="rejects_sha256"):
        ShardReceipt.from_bytes(canonical_json(receipt | {"rejects_sha256": digest}), "a receipt")
