from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import ScreenOptions
from dflash.data.evaluation_prompts import read_prompts
from dflash.data.merge_plan import MergeRules
from dflash.data.screening import NearDuplicates, SharedRuns, make_screen
from dflash.data.shard_files import ShardFiles
from dflash.errors import UsageError
from dflash.storage import open_store

IDS = st.lists(st.integers(0, 3), max_size=30)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(IDS, max_size=3), row=IDS, length=st.integers(4, 8))
def test_a_shared_run_is_found_exactly_where_there_is_one(texts: list[list[int]], row: list[int], length: int) -> None:
    runs = {tuple(text[start : start + length]) for text in texts for start in range(len(text) - length + 1)}
    expected = any(tuple(row[start : start + length]) in runs for start in range(len(row) - length + 1))
    assert SharedRuns.of(texts, length).finds(np.array(row, np.int32)) is expected


def test_prompts_are_read_from_every_known_form(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [{"prompt": "p"}, {"question": "q"}, {"messages": messages}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_prompts(open_store(str(tmp_path))) == ["p", "q", "u"]


@pytest.mark.parametrize("line", ["not json", "[]", '{"prompt": 3}', '{"messages": [{"role": "user"}]}'])
def test_a_record_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n' + line)
    with pytest.raises(UsageError, match=r"a\.jsonl:2"):
        read_prompts(open_store(str(tmp_path)))


class _Encoding:
    def __init__(self, text: str) -> None:
        self.ids = [int(word) for word in text.split()]


class _Numbers:
    """A tokenizer whose texts are their ids."""

    backend: Any

    def __init__(self) -> None:
        self.backend = self

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        assert not add_special_tokens
        return _Encoding(text)


@pytest.mark.parametrize(("action", "rows"), [("drop", ["a1", "a2"]), ("report", ["a0", "a1", "a2"])])
def test_contaminated_rows_are_counted_or_dropped(
    sandbox: Any, sample: Any, tmp_path: Path, action: str, rows: list[str]
) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "a.jsonl").write_text('{"prompt": "9 10 11 12 13 14"}')
    batch = sandbox.batch([sample("a0", 1), sample("a1", 2), sample("a2", 3)])
    options = ScreenOptions(
        contamination=action,
        evaluation_prompts=str(tmp_path / "eval"),
        ngram_tokens=4,  # type: ignore[arg-type]
    )
    tokenizer: Any = _Numbers()
    screen = make_screen(options, ShardFiles(sandbox.root), tokenizer, None)
    manifest = sandbox.merge(batch, MergeRules(screen=screen))
    assert manifest.counts.num_rows == len(rows)
    assert manifest.notes["merge"]["screen"]["found"] == {"contamination": 1}
    assert manifest.notes["merge"]["screen"]["dropped"] == 3 - len(rows)


def test_near_duplicates_are_found_and_others_are_not() -> None:
    pytest.importorskip("datasketch", reason="the extra dedup is not installed")
    rng = np.random.default_rng(0)
    first, other = (rng.integers(0, 50_000, 400).astype(np.int32) for _ in range(2))
    edited = first.copy()
    edited[200] = 7
    look = NearDuplicates(0.8, keep_found=False)
    assert [look.finds(row) for row in (first, other, edited, first)] == [False, False, True, True]
