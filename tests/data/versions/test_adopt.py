from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Sequence, Value, load_from_disk

from dflash.config import TokenizeOptions
from dflash.data.adopt import Adoption, adopt_dataset
from dflash.data.dataset import DatasetRoot
from dflash.data.quality import baseline_of
from dflash.data.verify import verify_dataset
from dflash.errors import DatasetError, IncompatibleError
from dflash.manifest import Manifest, TokenizerRecord
from dflash.storage import open_store

TOKENIZER = TokenizerRecord(name="synthetic", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=1_000)
OURS = Features(
    {
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("bool")),
        "sample_id": Value("string"),
        "source": Value("string"),
        "num_loss_tokens": Value("int32"),
    }
)


def saved(folder: Path, columns: dict[str, Any], types: Features | None, num_files: int = 3) -> Path:
    Dataset.from_dict(columns, features=types).save_to_disk(folder, num_shards=num_files)
    return folder


def values(count: int = 9) -> dict[str, Any]:
    lengths = [2 + row % 3 for row in range(count)]
    return {
        "input_ids": [[row] * length for row, length in enumerate(lengths)],
        "loss_mask": [[False] + [True] * (length - 1) for length in lengths],
        "sample_id": [f"s{row}" for row in range(count)],
        "source": ["web"] * count,
        "num_loss_tokens": [length - 1 for length in lengths],
    }


def common(count: int = 9, ids: str = "int64", mask: str = "int8") -> tuple[dict[str, Any], Features]:
    columns = {name: values(count)[name] for name in ("input_ids", "loss_mask")}
    columns["loss_mask"] = [[int(entry) for entry in row] for row in columns["loss_mask"]]
    return columns, Features({"input_ids": Sequence(Value(ids)), "loss_mask": Sequence(Value(mask))})


def adopt(folder: Path, root: Path, work: Path, options: TokenizeOptions | None = None) -> tuple[DatasetRoot, Manifest]:
    opened = DatasetRoot.open(str(root), cache=work / "cache")
    job = Adoption(open_store(str(folder)), opened, TOKENIZER, options or TokenizeOptions())
    return opened, adopt_dataset(job, work)


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.arrow"))}


def test_files_with_our_columns_are_kept_byte_for_byte(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", values(), OURS)
    root, manifest = adopt(folder, tmp_path / "train", tmp_path / "work")
    assert [entry.sha256 for entry in manifest.shards] == list(files(folder).values())
    assert verify_dataset(root, manifest).problems == ()
    loaded = load_from_disk(root.uri)
    assert loaded.features == OURS
    assert loaded.to_dict() == values()
    assert root.pointer().record.history[-1].action == "adopt"  # type: ignore[union-attr]
    assert [item.num_records for item in manifest.batches[0].inputs] == [3, 3, 3]
    assert list((tmp_path / "work").rglob("*.arrow")) == []


@pytest.mark.parametrize(
    ("ids", "mask"), [("int64", "int8"), ("int32", "bool"), ("uint32", "int64"), ("uint16", "uint8")]
)
def test_the_common_columns_of_any_width_are_cast(tmp_path: Path, ids: str, mask: str) -> None:
    folder = saved(tmp_path / "old", *common(ids=ids, mask=mask))
    root, manifest = adopt(folder, tmp_path / "train", tmp_path / "work")
    loaded = load_from_disk(root.uri)
    assert loaded.features == OURS
    assert loaded["input_ids"][:] == values()["input_ids"]
    assert loaded["loss_mask"][:] == values()["loss_mask"]
    assert loaded["sample_id"][:3] == [f"data-00000-of-00003.arrow:{row}" for row in range(3)]
    assert manifest.counts.num_rows == 9
    assert manifest.counts.num_loss_tokens == sum(values()["num_loss_tokens"])
    assert verify_dataset(root, manifest).problems == ()


def test_forty_five_files_keep_their_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", *common(90), num_files=45)
    root, manifest = adopt(folder, tmp_path / "train", tmp_path / "work")
    assert manifest.counts.num_shards == 45
    assert load_from_disk(root.uri)["input_ids"][:] == values(90)["input_ids"]


def test_a_folder_is_adopted_in_place(tmp_path: Path) -> None:
    folder = saved(tmp_path / "train", values(), OURS)
    reader, before = load_from_disk(str(folder)), files(folder)
    root, manifest = adopt(folder, folder, tmp_path / "work")
    assert files(folder) == before, "old files stay until garbage collection"
    assert reader.to_dict() == load_from_disk(root.uri).to_dict() == values()
    assert verify_dataset(root, manifest).problems == ()
    assert adopt(folder, folder, tmp_path / "work")[1] == manifest, "adopting twice is adopting once"
    assert len(root.pointer().record.history) == 1  # type: ignore[union-attr]


def test_a_folder_with_other_columns_is_adopted_in_place(tmp_path: Path) -> None:
    folder = saved(tmp_path / "train", *common())
    root, manifest = adopt(folder, folder, tmp_path / "work")
    assert load_from_disk(root.uri).features == OURS
    assert verify_dataset(root, manifest).problems == ()


def test_the_first_batch_is_not_measured_against_sources_nobody_recorded(tmp_path: Path) -> None:
    _, bare = adopt(saved(tmp_path / "a", *common()), tmp_path / "one", tmp_path / "work")
    _, named = adopt(saved(tmp_path / "b", values(), OURS), tmp_path / "two", tmp_path / "work")
    mixes = [baseline_of(manifest.quality) for manifest in (bare, named)]
    assert [(mix.sources, mix.scripts) for mix in mixes if mix is not None] == [({}, {}), ({"web": 9}, {})]


def test_columns_that_do_not_fit_are_refused_in_a_table(tmp_path: Path) -> None:
    columns = {"input_ids": [[0.5]], "labels": [[1]], "sample_id": [7]}
    folder = saved(tmp_path / "old", columns, None, num_files=1)
    with pytest.raises(IncompatibleError) as caught:
        adopt(folder, tmp_path / "train", tmp_path / "work")
    refused = [line.split()[0] for line in str(caught.value).splitlines() if "<- refused" in line]
    assert refused == ["input_ids", "loss_mask", "sample_id"]
    assert not (tmp_path / "train" / "state.json").exists()


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("input_ids", 4, [4, 1_000, 4], r"id 1000 is not in the tokenizer's vocabulary of 1000"),
        ("input_ids", 4, [4, -1, 4], r"id -1 is not in"),
        ("loss_mask", 4, [0, 2, 1], r"loss_mask holds 2, only 0 and 1"),
        ("loss_mask", 4, [0, 1], r"loss_mask is not as long as input_ids"),
        ("input_ids", 4, None, r"a value is missing"),
        ("input_ids", 4, [4, None, 4], r"a list holds a missing value"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, column: str, row: int, value: Any, message: str) -> None:
    columns, types = common()
    columns[column] = [value if number == row else item for number, item in enumerate(columns[column])]
    folder = saved(tmp_path / "old", columns, types)
    with pytest.raises(DatasetError, match=r"data-00001-of-00003\.arrow:1: " + message):
        adopt(folder, tmp_path / "train", tmp_path / "work")
    assert not (tmp_path / "train" / "state.json").exists()


def test_rows_longer_than_the_option_are_refused(tmp_path: Path) -> None:
    columns, types = common()
    columns["input_ids"][5], columns["loss_mask"][5] = [5] * 9, [1] * 9
    folder = saved(tmp_path / "old", columns, types)
    with pytest.raises(DatasetError, match="more than max_seq_len=8 tokens"):
        adopt(folder, tmp_path / "train", tmp_path / "work", TokenizeOptions(max_seq_len=8))


def test_a_count_that_contradicts_the_mask_is_refused(tmp_path: Path) -> None:
    columns = values()
    columns["num_loss_tokens"][7] += 1
    with pytest.raises(DatasetError, match=r"data-00002.*:1: num_loss_tokens is not the sum"):
        adopt(saved(tmp_path / "old", columns, OURS), tmp_path / "train", tmp_path / "work")


def test_what_is_no_single_saved_dataset_is_refused(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict(*common()[:1])}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DatasetError, match="DatasetDict"):
        adopt(tmp_path / "dict", tmp_path / "train", tmp_path / "work")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no state\.json among its 0 objects"):
        adopt(tmp_path / "empty", tmp_path / "train", tmp_path / "work")
    folder = saved(tmp_path / "old", *common())
    (folder / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DatasetError, match=r"1 are missing, first 'data-00001"):
        adopt(folder, tmp_path / "train", tmp_path / "work")


@pytest.mark.parametrize("content", [b"not json", b"[]", b'{"_data_files": 3}', b'{"_data_files": [{}]}'])
def test_a_damaged_state_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = saved(tmp_path / "old", *common())
    (folder / "state.json").write_bytes(content)
    with pytest.raises(DatasetError):
        adopt(folder, tmp_path / "train", tmp_path / "work")


def test_a_file_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", *common())
    (tmp_path / "secret.arrow").write_bytes((folder / "data-00000-of-00003.arrow").read_bytes())
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../secret.arrow"
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DatasetError, match="1 are missing"):
        adopt(folder, tmp_path / "train", tmp_path / "work")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", *common())
    path = folder / "data-00001-of-00003.arrow"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DatasetError, match=r"data-00001.*Arrow IPC stream"):
        adopt(folder, tmp_path / "train", tmp_path / "work")


def test_a_file_cut_between_two_record_batches_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", *common())
    path = folder / "data-00002-of-00003.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DatasetError, match="cut between two record batches"):
        adopt(folder, tmp_path / "train", tmp_path / "work")


def test_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", *common())
    other = saved(tmp_path / "other", *common(ids="int16"))
    name = "data-00001-of-00003.arrow"
    (folder / name).write_bytes((other / name).read_bytes())
    with pytest.raises(DatasetError, match=r"data-00001.* has another schema"):
        adopt(folder, tmp_path / "train", tmp_path / "work")


def test_a_root_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    other = saved(tmp_path / "train", *common(3), num_files=1)
    state = (other / "state.json").read_bytes()
    with pytest.raises(DatasetError, match="holds another saved dataset"):
        adopt(saved(tmp_path / "old", *common()), other, tmp_path / "work")
    assert (other / "state.json").read_bytes() == state
    adopt(saved(tmp_path / "b", *common()), tmp_path / "new", tmp_path / "work")
    with pytest.raises(DatasetError, match="was not made from"):
        adopt(saved(tmp_path / "c", *common(4)), tmp_path / "new", tmp_path / "work")
