from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import shards
from dflash.data.rows import RowFlag, TokenizedRows, join_rows
from dflash.data.saved_format import dataset_info
from dflash.data.shards import (
    INDEX_SCHEMA,
    SHARD_SCHEMA,
    ShardWriter,
    WrittenShard,
    content_hashes,
    read_batches,
    read_index,
)
from dflash.errors import DatasetError


def make_rows(lengths: list[int], seed: int = 0) -> TokenizedRows:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    mask = rng.random(offsets[-1]) < 0.5
    count = len(lengths)
    return TokenizedRows(
        ids=rng.integers(0, 248_000, offsets[-1]).astype(np.int32),
        offsets=offsets,
        mask=mask,
        sample_ids=[f"样本 {row}" for row in range(count)],
        sources=["" if row % 2 else "chat" for row in range(count)],
        num_loss_tokens=np.array([mask[a:b].sum() for a, b in itertools.pairwise(offsets)], np.int32),
        output_tokens=np.array([-1 if row % 3 == 0 else row for row in range(count)], np.int32),
        finish_reasons=["stop"] * count,
        flags=np.array([row % 64 for row in range(count)], np.uint16),
        scripts=["latin"] * count,
    )


def write(folder: Path, parts: list[TokenizedRows], rows_per_batch: int = 7) -> WrittenShard:
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder / "shard.arrow", folder / "index.arrow", rows_per_batch) as writer:
        for part in parts:
            writer.write(part)
        return writer.close()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    seed=st.integers(0, 10),
)
@settings(max_examples=40, deadline=None)
def test_bytes_depend_on_rows_alone_and_round_trip(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], seed: int
) -> None:
    rows = make_rows(lengths, seed)
    bounds = [0, *sorted(min(cut, rows.num_rows) for cut in cuts), rows.num_rows]
    folder = tmp_path_factory.mktemp("shard")
    whole = write(folder / "whole", [rows])
    parts = write(folder / "parts", [rows.part(start, end) for start, end in itertools.pairwise(bounds)])
    assert (whole.shard.sha256, whole.index.sha256) == (parts.shard.sha256, parts.index.sha256)
    assert (whole.num_rows, whole.num_tokens) == (len(lengths), sum(lengths))

    table = pa.Table.from_batches(list(read_batches(whole.shard.path)), SHARD_SCHEMA)
    assert table["input_ids"].to_pylist() == [
        rows.ids[start:end].tolist() for start, end in itertools.pairwise(rows.offsets)
    ]
    assert table["loss_mask"].to_pylist() == [
        rows.mask[start:end].tolist() for start, end in itertools.pairwise(rows.offsets)
    ]
    assert table["sample_id"].to_pylist() == list(rows.sample_ids)
    assert table["num_loss_tokens"].to_pylist() == rows.num_loss_tokens.tolist()
    assert whole.num_loss_tokens == rows.num_loss_tokens.sum() == rows.mask.sum()
    assert {batch.num_rows for batch in read_batches(whole.shard.path)} <= {7, len(lengths) % 7}

    index = read_index(whole.index.path)
    assert index["content_hash"].to_pylist() == content_hashes(rows.ids, rows.offsets)
    assert index["output_tokens"].to_pylist() == [None if n < 0 else n for n in rows.output_tokens.tolist()]
    assert index["flags"].to_pylist() == rows.flags.tolist()


@pytest.mark.parametrize("lengths", [[5] * 20, [700_000, 3]], ids=["small", "in pieces"])
def test_digest_and_size_are_those_of_the_file(tmp_path: Path, lengths: list[int]) -> None:
    rows = make_rows(lengths)
    written = write(tmp_path, [rows])
    (batch, *_) = read_batches(written.shard.path)
    assert batch["input_ids"].flatten().to_numpy().tolist() == rows.ids[: sum(lengths[:7])].tolist()
    for file in (written.shard, written.index):
        data = file.path.read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.num_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.arrow", "shard.arrow"]


def test_joining_and_cutting_are_inverse() -> None:
    rows = make_rows([3, 1, 4, 1, 5])
    again = join_rows([rows.part(0, 2), rows.part(2, 2), rows.part(2, 5)])
    assert content_hashes(again.ids, again.offsets) == content_hashes(rows.ids, rows.offsets)
    assert again.offsets.tolist() == rows.offsets.tolist()
    assert list(again.sample_ids) == list(rows.sample_ids)
    assert np.array_equal(again.mask, rows.mask)


def test_datasets_opens_a_shard_by_itself(tmp_path: Path) -> None:
    rows = make_rows([5, 6, 7])
    written = write(tmp_path, [rows])
    dataset = Dataset.from_file(str(written.shard.path))
    assert dataset[1]["input_ids"] == rows.ids[5:11].tolist()
    assert dataset.features.arrow_schema.types == SHARD_SCHEMA.types


def test_datasets_opens_a_folder_of_shards(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / "shards" / "a", [make_rows([5, 6])]),
        write(tmp_path / "shards" / "b", [make_rows([7])]),
    )
    files = [str(shard.shard.path.relative_to(tmp_path)) for shard in (first, second)]
    Dataset.from_dict({"x": [1]}).save_to_disk(tmp_path / "like")  # the state that this version of datasets writes
    state = (tmp_path / "like" / "state.json").read_text()
    entry = '{\n      "filename": "data-00000-of-00001.arrow"\n    }'
    assert entry in state
    state = state.replace(entry, ", ".join(f'{{"filename": "{file}"}}' for file in files))
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_bytes(dataset_info())
    dataset = load_from_disk(str(tmp_path))
    assert [len(row["loss_mask"]) for row in dataset] == [5, 6, 7]


def test_another_schema_is_refused_with_both_named(tmp_path: Path) -> None:
    written = write(tmp_path, [make_rows([5])])
    with pytest.raises(DatasetError, match=r"(?s)another schema.*expected: sample_id: string.*found: +input_ids: list"):
        read_index(written.shard.path)
    wide = pa.table({"input_ids": pa.array([[1]], pa.list_(pa.int64()))})
    with pa.OSFile(str(tmp_path / "wide.arrow"), "wb") as sink, pa.ipc.new_stream(sink, wide.schema) as writer:
        writer.write_table(wide)
    with pytest.raises(DatasetError, match="input_ids: list<item: int64>"):
        list(read_batches(tmp_path / "wide.arrow"))


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.9])
def test_a_cut_stream_is_refused(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path, [make_rows([50] * 60)]).shard.path
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(DatasetError, match=r"shard\.arrow can't be read as an Arrow IPC stream"):
        list(read_batches(path))


def test_no_file_and_no_stream_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none\.arrow can't be read"):
        list(read_batches(tmp_path / "none.arrow"))
    (tmp_path / "text.arrow").write_text('{"input_ids": [1, 2]}\n' * 50)
    with pytest.raises(DatasetError, match=r"text\.arrow can't be read"):
        list(read_batches(tmp_path / "text.arrow"))


def test_an_error_leaves_no_file_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with ShardWriter(tmp_path / "shard.arrow", tmp_path / "index.arrow", 2) as writer:
            writer.write(make_rows([5, 6, 7]))
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_shard_may_be_without_rows(tmp_path: Path) -> None:
    written = write(tmp_path, [])
    assert written.num_rows == 0
    assert list(read_batches(tmp_path / "shard.arrow")) == []
    assert read_index(tmp_path / "index.arrow").num_rows == 0


def test_equal_rows_have_equal_hashes_and_others_not() -> None:
    rows = make_rows([4, 4, 4])
    ids = rows.ids.copy()
    ids[4:8] = ids[:4]
    first, second, third = content_hashes(ids, rows.offsets)
    assert first == second != third
    assert first == hashlib.blake2b(ids[:4].astype("<i4").tobytes(), digest_size=16).digest()


def test_schemas_and_flags_are_what_stored_files_hold() -> None:
    """A change here needs a new schema version: stored shards and indexes keep the old meaning."""
    assert [f"{field.name}: {field.type}" for field in SHARD_SCHEMA] == [
        "input_ids: list<item: int32>",
        "loss_mask: list<item: bool>",
        "sample_id: string",
        "source: string",
        "num_loss_tokens: int32",
    ]
    assert [field.name for field in INDEX_SCHEMA][:3] == ["sample_id", "source", "content_hash"]
    assert [(flag.name, flag.value) for flag in RowFlag] == [
        ("THINKING_ONLY", 1),
        ("LENGTH_CUT", 2),
        ("WINDOW_CUT", 4),
        ("SAMPLED_IDS", 8),
        ("UNDECODABLE", 16),
        ("OUTPUT_MISMATCH", 32),
        ("VERBATIM_WHITESPACE", 64),
    ]


@given(st.lists(st.integers(0, 700), max_size=12), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_content_hashes_are_blake2b(lengths: list[int], seed: int) -> None:
    """Of rows of any length in any order, empty ones and whole blocks of 32 ids included, however they are computed."""
    rows = make_rows([*lengths, 0, 32, 33, 64], seed)
    bounds = itertools.pairwise((rows.offsets * 4).tolist())
    data = rows.ids.astype("<i4").tobytes()
    expected = [hashlib.blake2b(data[start:end], digest_size=16).digest() for start, end in bounds]
    assert content_hashes(rows.ids, rows.offsets) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_row_hashes", None)
        assert content_hashes(rows.ids, rows.offsets) == expected


@pytest.mark.parametrize("bounds", [[], [-1, 4], [0, 9], [0, 8, 4, 8]])
def test_hashes_of_rows_outside_the_data_are_refused(bounds: list[int]) -> None:
    native = pytest.importorskip("dflash.data._row_hashes", reason="no compiler when the package was installed")
    with pytest.raises(ValueError, match="expected int64 that ascend within 8 bytes"):
        native.blake2b_rows(b"12345678", np.array(bounds, np.int64).data)
