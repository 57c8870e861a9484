from __future__ import annotations

import json
from typing import Any

import pytest

from dflash.data.merge_plan import MergeRules
from dflash.data.versions import diff_versions, list_versions
from dflash.errors import DatasetError


@pytest.fixture
def dataset(sandbox: Any, sample: Any) -> Any:
    """Version 1: four rows; version 2: one of them replaced and two added; then back to version 1."""
    first = sandbox.merge(sandbox.batch([sample(f"a{n}", n) for n in range(2)], [sample("b0", 9), sample("b1", 8)]))
    new = [sample("b0", 50, "code"), sample("c0", 60, "code"), sample("c1", 61)]
    sandbox.merge(sandbox.batch(new, name="two"), MergeRules(duplicates="keep_new"))
    sandbox.root.publish(first, sandbox.root.pointer(), "rollback")
    return sandbox


def test_versions_are_listed_with_counts_and_the_current_one(dataset: Any) -> None:
    lines = list_versions(dataset.root)
    assert [(line.version, line.num_rows, line.num_shards, line.is_current) for line in lines] == [
        (1, 4, 2, True),
        (2, 6, 3, False),
    ]
    assert lines[1].parent == lines[0].name
    assert lines[1].sources == ("s3://completions/batch", "s3://completions/two")
    assert [line.action for line in lines] == ["publish", "publish"]


def test_a_diff_counts_what_is_really_there(dataset: Any) -> None:
    diff = diff_versions(dataset.root, 1, 2)
    assert (diff.shared_shards, diff.only_first, diff.only_second) == (1, 1, 2)
    assert (diff.first.counts.num_rows, diff.second.counts.num_rows) == (4, 6)
    assert (diff.first.mix.sources, diff.second.mix.sources) == ({"web": 4}, {"code": 2, "web": 4})
    assert diff.second.mix.scripts == {"latin": 6}
    # Contents 0, 1, 9, 8 have 3, 4, 4, 3 tokens; 50, 60, 61 instead of 9 have 5, 3, 4.
    assert diff.first.lengths[:4] == (0, 2, 2, 0)
    assert diff.second.lengths[:4] == (0, 3, 3, 0)
    assert sum(diff.second.loss_tokens) == 6
    assert diff.settings == ()
    assert json.loads(json.dumps(diff.to_json()))["second"]["counts"]["num_rows"] == 6


def test_a_version_that_is_not_there_is_refused_with_those_that_are(dataset: Any, sandbox: Any) -> None:
    with pytest.raises(DatasetError, match=r"no version 7\. Published versions: \[1, 2\]"):
        diff_versions(dataset.root, 1, 7)


def test_an_empty_root_has_no_versions(sandbox: Any) -> None:
    with pytest.raises(DatasetError, match="holds no published version"):
        list_versions(sandbox.root)
