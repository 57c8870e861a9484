from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from datasets import load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.config import MixOptions, TokenizeOptions
from dflash.data.compatibility import Recipe, check_compatible
from dflash.data.merge import merge_manifest, publish_merge
from dflash.data.merge_plan import MergeRules
from dflash.data.verify import verify_dataset
from dflash.errors import DamagedDatasetError, IncompatibleError, PublishConflictError
from dflash.manifest import ShardReceipt, batch_fingerprint, batch_from_receipts

KEEP_OLD, KEEP_NEW = MergeRules(duplicates="keep_old"), MergeRules(duplicates="keep_new")


@pytest.fixture
def rows(sample: Any) -> Any:
    """Rows `a0, a1, ...` with contents from a first number on."""

    def make(prefix: str, count: int, first: int, source: str = "web") -> list[Any]:
        return [sample(f"{prefix}{number}", first + number, source) for number in range(count)]

    return make


def ids_of(sandbox: Any) -> list[str]:
    return list(load_from_disk(sandbox.root.uri)["sample_id"])


def test_old_shards_are_named_not_moved(sandbox: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 4, 0), rows("b", 3, 10), name="one"))
    batch = sandbox.batch(rows("c", 2, 20), name="two")
    before, meta_before = (store.counters.snapshot() for store in (sandbox.root.store, sandbox.root.meta))
    plan = sandbox.plan(batch)
    written = sandbox.write(plan)
    second = merge_manifest(plan, written)
    publish_merge(sandbox.root, plan, second)
    after = sandbox.root.store.counters.snapshot()
    assert (written.old_bytes_read, written.old_bytes_sent, written.num_rewritten) == (0, 0, 0)
    pointer_size = (sandbox.root.store.local_path("state.json")).stat().st_size
    assert after.bytes_up - before.bytes_up == len(second.to_bytes()) + pointer_size
    assert after.bytes_copied == before.bytes_copied
    assert sandbox.root.meta.counters.snapshot().bytes_up == meta_before.bytes_up
    assert second.shards == (*first.shards, *batch.shards)
    assert (second.version, second.parent) == (2, first.name)
    assert [item.source for item in second.batches] == ["s3://completions/one", "s3://completions/two"]
    assert ids_of(sandbox) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "c0", "c1"]
    assert verify_dataset(sandbox.root, second).problems == ()


def test_a_reader_of_the_old_version_goes_on_reading(sandbox: Any, rows: Any) -> None:
    sandbox.merge(sandbox.batch(rows("a", 5, 0), name="one"))
    reader = load_from_disk(sandbox.root.uri)
    sandbox.merge(sandbox.batch([*rows("a", 2, 0), *rows("b", 2, 10)], name="two"), KEEP_NEW)
    assert list(reader["sample_id"]) == ["a0", "a1", "a2", "a3", "a4"]
    assert [list(reader[0]["input_ids"]), reader[4]["sample_id"]] == [[0, 1, 2], "a4"]
    assert ids_of(sandbox) == ["a2", "a3", "a4", "a0", "a1", "b0", "b1"]


def test_everything_that_differs_is_refused_in_one_table(sandbox: Any, rows: Any) -> None:
    current = sandbox.merge(sandbox.batch(rows("a", 2, 0)))
    tokenizer = current.tokenizer.model_copy(update={"fingerprint": "0" * 64, "template_fingerprint": "1" * 64})
    other = Recipe(tokenizer, TokenizeOptions(max_seq_len=4096, loss_on="all_turns"), schema_version=2)
    check_compatible(current, sandbox.recipe)
    with pytest.raises(IncompatibleError) as caught:
        check_compatible(current, other)
    lines = [line.split() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert lines == [
        ["field", "current", "new"],
        ["schema_version", "1", "2"],
        ["tokenizer.fingerprint", "f" * 64, "0" * 64],
        ["tokenizer.template_fingerprint", "e" * 64, "1" * 64],
        ["options.max_seq_len", "8192", "4096"],
        ["options.loss_on", "last_turn", "all_turns"],
    ]
    sandbox.recipe = other
    with pytest.raises(IncompatibleError, match="5 things differ"):
        sandbox.plan(sandbox.batch(rows("b", 2, 5), name="other"))


def test_duplicates_stop_the_merge_by_default(sandbox: Any, sample: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 3, 0)))
    batch = sandbox.batch([sample("a1", 50), sample("new", 2), sample("fine", 60)], name="two")
    with pytest.raises(IncompatibleError, match=r"2 of its 3 rows .*1 by sample id, 1 by content.*'a1', 'new'"):
        sandbox.merge(batch)
    assert sandbox.root.current() == first


def test_keep_old_drops_new_rows_and_reads_no_old_shard(sandbox: Any, sample: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 3, 0), name="one"))
    again, fresh = [sample("a1", 50), sample("b", 2), sample("c", 60)], rows("d", 2, 70)
    batch = sandbox.batch(again, fresh, rows("a", 2, 80), name="two")
    plan = sandbox.plan(batch, KEEP_OLD)
    written = sandbox.write(plan)
    manifest = merge_manifest(plan, written)
    publish_merge(sandbox.root, plan, manifest)
    assert (written.old_bytes_read, written.old_bytes_sent, written.num_rewritten) == (0, 0, 1)
    assert manifest.shards[0] == first.shards[0]
    assert manifest.shards[2] == batch.shards[1], "a shard without duplicates is kept as it is"
    assert ids_of(sandbox) == ["a0", "a1", "a2", "c", "d0", "d1"]
    assert manifest.batches[1].num_duplicates == 4
    assert manifest.notes["merge"]["duplicates"]["by_id"] == 3
    assert verify_dataset(sandbox.root, manifest).problems == ()


def test_keep_new_rewrites_only_the_old_shards_it_must(sandbox: Any, sample: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 3, 0), rows("b", 3, 10), rows("c", 2, 20), name="one"))
    batch = sandbox.batch([sample("b1", 50), sample("x", 20), sample("c1", 70)], name="two")
    plan = sandbox.plan(batch, KEEP_NEW)
    written = sandbox.write(plan)
    manifest = merge_manifest(plan, written)
    publish_merge(sandbox.root, plan, manifest)
    assert written.num_rewritten == 1, "the shard that lost all its rows isn't written anew"
    assert written.old_bytes_read == first.shards[1].num_bytes
    assert manifest.shards[0] == first.shards[0]
    assert ids_of(sandbox) == ["a0", "a1", "a2", "b0", "b2", "b1", "x", "c1"]
    assert verify_dataset(sandbox.root, manifest).problems == ()
    assert verify_dataset(sandbox.root, sandbox.root.manifest(1)).problems == (), "the old version stays whole"


def test_a_mixed_draw_is_recorded_and_rewrites_new_shards_only(sandbox: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 3, 0), name="one"))
    batch = sandbox.batch(rows("b", 20, 100, "web"), rows("c", 20, 200, "code"), name="two")
    mix = MixOptions(max_samples=12, source_caps={"code": 4}, seed=7)
    plan = sandbox.plan(batch, MergeRules(mix=mix))
    written = sandbox.write(plan)
    manifest = merge_manifest(plan, written)
    assert written.old_bytes_read == 0
    assert manifest.shards[0] == first.shards[0]
    assert manifest.counts.num_rows == 15
    note = manifest.notes["merge"]["mix"]
    assert note["options"]["seed"] == 7
    assert note["available"] == {"code": 20, "web": 20}
    assert sum(note["drawn"].values()) == 12
    assert note["drawn"]["code"] <= 4


def test_losing_a_race_changes_nothing_and_a_new_plan_wins(sandbox: Any, rows: Any) -> None:
    sandbox.merge(sandbox.batch(rows("a", 2, 0), name="one"))
    mine, theirs = sandbox.batch(rows("b", 2, 10), name="two"), sandbox.batch(rows("c", 2, 20), name="three")
    plan = sandbox.plan(mine)
    winner = sandbox.merge(theirs)
    manifest = merge_manifest(plan, sandbox.write(plan))
    with pytest.raises(PublishConflictError, match=winner.name):
        publish_merge(sandbox.root, plan, manifest)
    assert sandbox.root.current() == winner
    assert sandbox.merge(mine).version == 3
    assert ids_of(sandbox) == ["a0", "a1", "c0", "c1", "b0", "b1"]


def test_numbers_go_on_behind_the_highest_after_a_rollback(sandbox: Any, rows: Any) -> None:
    first = sandbox.merge(sandbox.batch(rows("a", 2, 0), name="one"))
    sandbox.merge(sandbox.batch(rows("b", 2, 10), name="two"))
    sandbox.root.publish(first, sandbox.root.pointer(), "rollback")
    third = sandbox.merge(sandbox.batch(rows("c", 2, 20), name="three"))
    assert (third.version, third.parent) == (3, first.name)


@pytest.mark.parametrize("field", ["num_rows", "num_tokens"])
def test_an_index_that_does_not_describe_its_shard_is_refused(sandbox: Any, rows: Any, field: str) -> None:
    batch = sandbox.batch(rows("a", 4, 0), name="one")
    entry = batch.shards[0].model_copy(update={field: getattr(batch.shards[0], field) + 1})
    with pytest.raises(DamagedDatasetError, match="doesn't describe its shard"):
        sandbox.plan(type(batch)(batch.recipe, batch.batch, (entry,), {}))


def test_counts_that_do_not_add_up_are_refused(sandbox: Any, rows: Any) -> None:
    plan = sandbox.plan(sandbox.batch(rows("a", 4, 0), name="one"))
    with pytest.raises(DamagedDatasetError, match=r"rows don't add up: 0 old \+ 4 new - 1 dropped = 3.* hold 4"):
        merge_manifest(replace(plan, dropped_rows=1), sandbox.write(plan))


def test_the_fingerprint_of_a_batch_is_the_manifests(sandbox: Any, rows: Any) -> None:
    batch = sandbox.batch(rows("a", 2, 0), rows("b", 2, 10))
    receipts = [ShardReceipt(shard=e, inputs=(), reject_reasons={}, rejects_sha256=None) for e in batch.shards]
    assert (
        batch_fingerprint(entry.fingerprint for entry in batch.shards) == batch_from_receipts("", receipts).fingerprint
    )


SAMPLES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=SAMPLES, new=st.lists(SAMPLES, min_size=1, max_size=3), policy=st.sampled_from([KEEP_OLD, KEEP_NEW]))
def test_any_merge_adds_up_and_is_idempotent(
    make_sandbox: Any, sample: Any, old: list[Any], new: list[list[Any]], policy: MergeRules
) -> None:
    sandbox = make_sandbox()
    rows = [[sample(f"s{name}", content) for name, content in shard] for shard in (old, *new)]
    first = sandbox.merge(sandbox.batch(rows[0], name="old"), KEEP_OLD)
    kept_before = ids_of(sandbox)
    if len({tuple(shard) for shard in rows[1:]}) != len(rows) - 1:
        return  # two equal shards in one batch have one address
    batch = sandbox.batch(*rows[1:], name="new")
    merged = sandbox.merge(batch, policy)
    again = sandbox.merge(batch, policy)
    assert again == merged
    assert again.version == sandbox.root.current().version == 2
    counts = merged.notes["merge"]["duplicates"]
    dropped = counts["dropped_old"] + counts["dropped_new"]
    assert merged.counts.num_rows == first.counts.num_rows + sum(map(len, new)) - dropped
    ids = ids_of(sandbox)
    assert len(ids) == merged.counts.num_rows
    assert max(Counter(ids).values()) == 1
    if policy is KEEP_OLD:
        assert ids[: len(kept_before)] == kept_before
    assert verify_dataset(sandbox.root, merged).problems == ()


@pytest.mark.slow
def test_a_merge_at_full_size_counts_every_row(sandbox: Any, sample: Any) -> None:
    def shards(first: int, total: int, number: int) -> list[list[Any]]:
        bounds = [first + total * part // number for part in range(number + 1)]
        return [[sample(f"id-{row}", row) for row in range(*pair)] for pair in pairwise(bounds)]

    first = sandbox.merge(sandbox.batch(*shards(0, 902_087, 45), name="one"))
    merged = sandbox.merge(sandbox.batch(*shards(902_087, 192_995, 10), name="two"))
    assert (first.counts.num_rows, merged.counts.num_rows, merged.counts.num_shards) == (902_087, 1_095_082, 55)
    assert load_from_disk(sandbox.root.uri).num_rows == 1_095_082
    assert verify_dataset(sandbox.root, merged).problems == ()
