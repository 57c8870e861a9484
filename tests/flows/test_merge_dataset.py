"""The merge flow on real completions, a real tokenizer and a real Prefect server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from dflash.config import GateThresholds, MergeRun, TokenizeOptions, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.verify import verify_dataset
from dflash.errors import IncompatibleError

pytestmark = pytest.mark.usefixtures("prefect_server", "home")

Records = list[dict[str, Any]]
BatchWriter = Callable[..., Path]
MakeRun = Callable[..., MergeRun]


@pytest.fixture
def make_run(tmp_path: Path, smollm2_tokenizer_dir: Path) -> MakeRun:
    def make(source: Path, options: TokenizeOptions | None = None, **values: Any) -> MergeRun:
        batch = TokenizeRun(
            source=str(source),
            dataset=str(tmp_path / "dataset"),
            tokenizer=str(smollm2_tokenizer_dir),
            options=options or TokenizeOptions(),
            files_per_shard=1,
            num_workers=1,
            # Completions of the small target are capped at 128 tokens; a few dozen rows have no steady mix.
            gate=GateThresholds(max_length_cut_share=1.0, max_script_shift=1.0, max_duplicate_share=1.0),
        )
        return MergeRun(batch=batch, **values)

    return make


def run_flow(run: MergeRun) -> dict[str, Any]:
    from flows.merge_dataset import merge_dataset

    return merge_dataset(run)


def test_a_batch_is_merged_once_and_old_shards_stay_where_they_are(
    write_batch: BatchWriter, make_run: MakeRun, example_records: Records, home: Path
) -> None:
    first = run_flow(make_run(write_batch(example_records[:30], 2, "one"), duplicates="keep_old"))
    assert (first["version"], first["rows_before"], first["backup"]) == (1, 0, None)
    run = make_run(write_batch(example_records[25:45], 2, "two"), duplicates="keep_old")
    second = run_flow(run)
    assert second["rows"] == second["rows_before"] + second["rows_of_batch"] - second["rows_dropped"]
    assert second["tokens"] == second["tokens_before"] + second["tokens_of_batch"] - second["tokens_dropped"]
    assert second["rows_dropped"] >= 5
    assert (second["old_shard_bytes_read"], second["old_shard_bytes_sent"]) == (0, 0)
    assert second["backup"]["manifest"] == first["manifest"]
    root = DatasetRoot.open(run.batch.dataset)
    manifest = root.manifest(2)
    assert manifest.shards[:2] == root.manifest(1).shards
    assert load_from_disk(run.batch.dataset).num_rows == second["rows"]
    assert verify_dataset(root, manifest).problems == ()
    assert [path for path in (home / "work" / "spool").glob("*/*") if not path.name.startswith(".")] == []
    again = run_flow(run)
    assert (again["already_merged"], again["version"], again["rows"]) == (True, 2, second["rows"])


def test_a_batch_that_does_not_fit_is_refused_before_it_is_tokenized(
    write_batch: BatchWriter, make_run: MakeRun, example_records: Records, home: Path
) -> None:
    run_flow(make_run(write_batch(example_records[:10], 1, "one"), duplicates="keep_old"))
    other = make_run(write_batch(example_records[20:30], 1, "two"), TokenizeOptions(max_seq_len=512))
    with pytest.raises(IncompatibleError, match=r"options\.max_seq_len\s+8192\s+512"):
        run_flow(other)
    assert not list((home / "work" / "spool").glob("*/*/receipt.json"))
