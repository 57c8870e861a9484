from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import TokenizeOptions
from dflash.data.dataset import DatasetRoot
from dflash.data.rows import TokenizedRows
from dflash.data.shards import SHARD_SCHEMA, ShardWriter, read_batches
from dflash.data.verify import Problem, verify_dataset, verify_shard
from dflash.errors import DatasetError
from dflash.manifest import Batch, Counts, Manifest, ShardEntry, TokenizerRecord, sha256_hex

VOCAB_SIZE = 1000
ROWS = 25


def make_rows(seed: int, count: int = ROWS) -> TokenizedRows:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 30, count)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    mask = rng.random(offsets[-1]) < 0.5
    return TokenizedRows(
        ids=rng.integers(0, VOCAB_SIZE, offsets[-1]).astype(np.int32),
        offsets=offsets,
        mask=mask,
        sample_ids=[f"s{seed}-{row}" for row in range(count)],
        sources=["chat"] * count,
        num_loss_tokens=np.add.reduceat(mask, offsets[:-1], dtype=np.int32),
        output_tokens=np.full(count, -1, np.int32),
        finish_reasons=["stop"] * count,
        flags=np.zeros(count, np.uint16),
        scripts=["latin"] * count,
    )


def write_shard(folder: Path, seed: int) -> tuple[ShardEntry, Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder / "shard.arrow", folder / "index.arrow", rows_per_batch=8) as writer:
        writer.write(make_rows(seed))
        written = writer.close()
    entry = written.entry(sha256_hex(b"%d" % seed), "test")
    return entry, written.shard.path, written.index.path


def check(entry: ShardEntry, shard: Path, index: Path | None) -> list[Problem]:
    return verify_shard(shard, entry, index_path=index, vocab_size=VOCAB_SIZE)


def rewrite(shard: Path, change: Callable[[list[dict[str, object]]], None], entry: ShardEntry) -> ShardEntry:
    """Change rows and make the manifest agree with the new file: only the rows can show what is wrong."""
    table = pa.Table.from_batches(list(read_batches(shard)), SHARD_SCHEMA)
    rows = table.to_pylist()
    change(rows)
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_stream(sink, SHARD_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, SHARD_SCHEMA), max_chunksize=8)
    data = shard.read_bytes()
    return entry.model_copy(update={"sha256": sha256_hex(data), "num_bytes": len(data)})


def test_a_sound_shard_has_no_problem(tmp_path: Path) -> None:
    entry, shard, index = write_shard(tmp_path, 1)
    assert check(entry, shard, index) == []
    assert verify_shard(shard, entry) == []


def flip_mask(rows: list[dict[str, object]]) -> None:
    for number in (3, 9, 10, 11, 12, 13, 20):
        rows[number]["loss_mask"] = [not bit for bit in [True, *rows[number]["loss_mask"][1:]]]


def shorten_mask(rows: list[dict[str, object]]) -> None:
    rows[10]["loss_mask"] = rows[10]["loss_mask"][:-1]


def leave_vocabulary(rows: list[dict[str, object]]) -> None:
    rows[17]["input_ids"] = [VOCAB_SIZE, *rows[17]["input_ids"][1:]]


def go_negative(rows: list[dict[str, object]]) -> None:
    rows[0]["input_ids"] = [*rows[0]["input_ids"][:-1], -1]


def change_token(rows: list[dict[str, object]]) -> None:
    rows[5]["input_ids"] = [(rows[5]["input_ids"][0] + 1) % VOCAB_SIZE, *rows[5]["input_ids"][1:]]


def rename(rows: list[dict[str, object]]) -> None:
    rows[24]["sample_id"] = "\x1b[31mother"


def drop_row(rows: list[dict[str, object]]) -> None:
    rows.pop()


def null_id(rows: list[dict[str, object]]) -> None:
    rows[2]["sample_id"] = None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (flip_mask, "num_loss_tokens in row 3 (id s1-3), 9 (id s1-9), 10 (id s1-10), 11 (id s1-11), 12 (id s1-12) and"),
        (shorten_mask, "length of loss_mask in row 10 (id s1-10)"),
        (leave_vocabulary, "id in row 17 (id s1-17): expected 0 to 999, found 1000"),
        (go_negative, "id in row 0 (id s1-0): expected 0 to 999, found -1"),
        (change_token, "content_hash of the index in row 5 (id s1-5)"),
        (rename, "sample_id of the index in row 24 (id \\x1b[31mother): expected \\x1b[31mother, found s1-24"),
        (drop_row, "rows: expected 25, found 24"),
        (null_id, "nulls in row 0"),
    ],
)  # fmt: skip
def test_each_wrong_row_is_named(
    tmp_path: Path, change: Callable[[list[dict[str, object]]], None], expected: str
) -> None:
    entry, shard, index = write_shard(tmp_path, 1)
    problems = check(rewrite(shard, change, entry), shard, index)
    assert any(expected in str(problem) for problem in problems), [str(problem) for problem in problems]
    assert not any("SHA-256" in problem.where or "size" in problem.where for problem in problems)


def test_wrong_totals_in_the_manifest_are_named(tmp_path: Path) -> None:
    entry, shard, index = write_shard(tmp_path, 1)
    wrong = entry.model_copy(update={"num_tokens": 5, "num_loss_tokens": 6, "sha256": "0" * 64, "num_bytes": 7})
    found = {problem.where.partition(" ")[2]: problem.expected for problem in check(wrong, shard, index)}
    assert found == {"size": "7 bytes", "SHA-256": "0" * 64, "tokens": "5", "loss tokens": "6"}


def test_an_index_of_another_shard_is_found(tmp_path: Path) -> None:
    entry, shard, _ = write_shard(tmp_path / "a", 1)
    _, _, other = write_shard(tmp_path / "b", 2)
    found = " ".join(str(problem) for problem in check(entry, shard, other))
    assert f"index/{entry.index_sha256}.arrow SHA-256" in found
    assert "content_hash of the index in row 0 (id s1-0)" in found
    assert "and 20 more" in found


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:0], lambda data: b"x" * len(data)]
)
def test_files_that_are_no_streams_are_problems_not_crashes(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    entry, shard, index = write_shard(tmp_path, 1)
    shard.write_bytes(damage(shard.read_bytes()))
    index.write_bytes(damage(index.read_bytes()))
    problems = {problem.where: problem for problem in check(entry, shard, index)}
    assert problems[entry.key].expected == "a readable shard"
    assert problems[entry.index_key].expected == "a readable index"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardEntry, Path, Path]:
    return write_shard(tmp_path_factory.mktemp("sound"), 3)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), in_index=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_is_found_and_crashes_nothing(
    sound: tuple[ShardEntry, Path, Path], place: int, bit: int, in_index: bool
) -> None:
    entry, shard, index = sound
    source = index if in_index else shard
    data = bytearray(source.read_bytes())
    data[place % len(data)] ^= 1 << bit
    damaged = source.with_name("damaged.arrow")
    damaged.write_bytes(data)
    problems = check(entry, shard, damaged) if in_index else check(entry, damaged, index)
    assert any("SHA-256" in problem.where for problem in problems)


def publish(tmp_path: Path) -> tuple[DatasetRoot, Manifest]:
    root = DatasetRoot.open(str(tmp_path / "root"), cache=tmp_path / "cache")
    entries = []
    for seed in (1, 2, 3):
        entry, shard, index = write_shard(tmp_path / f"made-{seed}", seed)
        root.store.put_if_absent(entry.key, shard)
        root.meta.put_if_absent(entry.index_key, index)
        entries.append(entry)
    rejects = b'{"reason": "bad_json"}\n'
    root.meta.put_if_absent(f"rejects/{sha256_hex(rejects)}.jsonl", rejects)
    batch = Batch(
        source="batch", fingerprint="f" * 64, inputs=(), num_shards=3, num_rows=75, rejects=(sha256_hex(rejects),)
    )
    manifest = Manifest(
        version=1,
        parent=None,
        created_at=datetime(2026, 11, 30, tzinfo=UTC),
        schema_version=1,
        code_version=1,
        tokenizer=TokenizerRecord(name="t", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=VOCAB_SIZE),
        options=TokenizeOptions(),
        shards=tuple(entries),
        batches=(batch,),
        counts=Counts.of(entries),
        quality={},
    )
    root.publish(manifest, expected=None)
    return root, manifest


class TestWholeDataset:
    def test_a_sound_version(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        report = verify_dataset(root, root.manifest())
        assert report.problems == ()
        assert report.unreferenced == ()
        assert report.to_json()["sound"] is True
        assert json.loads(json.dumps(report.to_json()))["num_rows"] == 75
        assert f"{manifest.name} is sound: 3 shards, 75 rows" in report.describe()

    def test_everything_damaged_is_named_and_the_rest_is_read(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        first, second, third = manifest.shards
        (tmp_path / "root" / first.key).unlink()
        (tmp_path / "root.meta" / second.index_key).unlink()
        path = tmp_path / "root" / third.key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "root.meta" / "rejects")
        (tmp_path / "root" / "dataset_info.json").write_text("{}")
        report = verify_dataset(root, manifest)
        text = report.describe()
        missing = [problem.where for problem in report.problems if problem.found == "missing"]
        assert missing == [first.key, second.index_key, f"rejects/{manifest.batches[0].rejects[0]}.jsonl"]
        assert f"{third.key} SHA-256: expected {third.sha256}" in text
        assert "dataset_info.json: expected the features of the schema" in text
        assert second.key not in text
        assert "dflash restore" in text

    def test_a_pointer_that_names_other_files_is_found(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        path = tmp_path / "root" / "state.json"
        state = json.loads(path.read_bytes())
        state["_data_files"].pop()
        path.write_text(json.dumps(state))
        (problem,) = verify_dataset(root, manifest).problems
        assert (problem.where, problem.found) == ("state.json", "other values of _data_files")

    def test_leftovers_are_listed_and_are_no_damage(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        for store, key in ((root.store, "shards/left.arrow"), (root.meta, "index/left.arrow")):
            store.put_if_absent(key, b"left by a run that was killed")
        report = verify_dataset(root, manifest)
        assert report.problems == ()
        assert [Path(name).name for name in report.unreferenced] == ["left.arrow", "left.arrow"]

    def test_an_older_version_that_cannot_be_read_is_a_problem(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        shards = manifest.shards[:2]
        second = manifest.model_copy(
            update={"version": 2, "parent": manifest.name, "shards": shards, "counts": Counts.of(shards)}
        )
        root.publish(second, expected=root.pointer())
        assert verify_dataset(root, second).unreferenced == ()
        (tmp_path / "root" / manifest.key).write_text("{}")
        (problem,) = verify_dataset(root, second).problems
        assert problem.where == manifest.key

    def test_a_damaged_pointer_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        root, manifest = publish(tmp_path)
        (tmp_path / "root" / "state.json").write_text("{")
        with pytest.raises(DatasetError, match=r"state\.json"):
            verify_dataset(root, manifest)
