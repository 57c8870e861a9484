"""The contract of a store, run against a real S3 server and a folder alike."""

from __future__ import annotations

import hashlib
import pickle
import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from dflash.errors import IntegrityError, ObjectNotFoundError, PreconditionError, StorageError, UsageError
from dflash.storage import ObjectInfo, Store, open_store

WRITERS = 16
ROUNDS = 5
ODD_KEYS = [
    "with space/and more.txt",
    "plus+sign",
    "percent%20and%",
    "ümlaut/日本/é",  # composed
    "ümlaut/日本/é",  # decomposed: another key
    "quote'\"`",
    "query?x=1&y#z",
    "..leading/dots..",
    "~tilde/$()!,;:@=*[]{}|<>^",
]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_is_put_is_listed_and_read(store: Store, tmp_path: Path) -> None:
    assert store.list() == []
    assert store.list_folders() == ()
    assert store.put_if_absent("a/one", b"1")
    assert store.put_if_absent("ab/two", b"22")
    assert store.put_if_absent("empty", b"")
    assert [(info.key, info.size) for info in store.list()] == [("a/one", 1), ("ab/two", 2), ("empty", 0)]
    assert [info.key for info in store.list("a")] == [info.key for info in store.list("a/")] == ["a/one"]
    assert store.list("nothing/here") == []
    assert store.list_folders() == ("a", "ab")
    assert store.read("ab/two") == b"22"
    assert store.read("empty") == b""
    transfer = store.download("ab/two", tmp_path / "deep" / "file", expect=store.list("ab")[0])
    assert (tmp_path / "deep" / "file").read_bytes() == b"22"
    assert (transfer.size, transfer.sha256) == (2, sha256_of(b"22"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


def test_missing_objects_have_their_own_error(store: Store, tmp_path: Path) -> None:
    for attempt in (
        lambda: store.head("no/such"),
        lambda: store.read("no/such"),
        lambda: store.download("no/such", tmp_path / "file"),
        lambda: store.verify("no/such"),
        lambda: store.copy("no/such", store, "target", size=1),
    ):
        with pytest.raises(ObjectNotFoundError, match="no/such"):
            attempt()
    assert not (tmp_path / "file").exists()


def test_put_if_absent_keeps_what_is_there(store: Store, tmp_path: Path) -> None:
    assert store.put_if_absent("key", b"first")
    assert not store.put_if_absent("key", b"first")
    for other in (b"other", b"of another size"):
        with pytest.raises(IntegrityError, match="is there already"):
            store.put_if_absent("key", other)
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    assert store.put_if_absent("file", source, sha256=sha256_of(b"from a file"))
    assert (store.read("key"), store.read("file")) == (b"first", b"from a file")


def test_a_source_with_another_digest_is_not_stored(store: Store) -> None:
    with pytest.raises(IntegrityError, match="expected sha256"):
        store.put_if_absent("key", b"damaged", sha256=sha256_of(b"whole"))
    assert store.list() == []
    with pytest.raises(StorageError, match="source"):
        store.put_if_absent("key", Path("/no/such/source"))


def test_replace_follows_the_etag(store: Store) -> None:
    first = store.replace("state.json", b"1", if_match=None)
    assert store.head("state.json").etag == first
    with pytest.raises(PreconditionError, match="expected no object"):
        store.replace("state.json", b"2", if_match=None)
    second = store.replace("state.json", b"2", if_match=first)
    assert second != first
    with pytest.raises(PreconditionError, match=first):
        store.replace("state.json", b"3", if_match=first)
    with pytest.raises(PreconditionError):
        store.replace("missing.json", b"1", if_match=first)
    assert store.read("state.json") == b"2"
    assert [info.key for info in store.list()] == ["state.json"]


def test_a_repeated_replace_is_its_own_write_not_a_conflict(store: Store) -> None:
    first = store.replace("state.json", b"1", if_match=None)
    second = store.replace("state.json", b"2", if_match=first)
    assert store.replace("state.json", b"2", if_match=first) == second


def test_of_many_creators_one_wins(store: Store) -> None:
    for number in range(ROUNDS):
        assert race(lambda writer, n=number: create(store, f"key-{n}", writer)) == {"won": 1, "lost": WRITERS - 1}


def test_of_many_replacers_one_wins(store: Store) -> None:
    etag = store.replace("state.json", b"start", if_match=None)
    for number in range(ROUNDS):
        outcome = race(lambda writer, n=number, e=etag: swap(store, e, f"{n}-{writer}".encode()))
        assert outcome == {"won": 1, "lost": WRITERS - 1}
        etag = store.head("state.json").etag or ""


def test_pages_are_complete_and_deletes_reach_all(store: Store) -> None:
    keys = [f"many/{number:04d}" for number in range(130)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda key: store.put_if_absent(key, b"x"), keys))
    assert [info.key for info in store.list("many")] == keys
    store.delete([*keys[1:], "many/never-was"])
    assert [info.key for info in store.list()] == keys[:1]


def test_reads_are_pinned_to_what_was_listed(store: Store, tmp_path: Path) -> None:
    etag = store.replace("input", b"old", if_match=None)
    info = ObjectInfo("input", 3, etag)
    assert store.read("input", expect=info) == b"old"
    store.replace("input", b"new", if_match=etag)
    for read in (
        lambda: store.read("input", expect=info),
        lambda: store.verify("input", expect=info),
        lambda: store.download("input", tmp_path / "file", expect=info),
    ):
        with pytest.raises(PreconditionError, match="input"):
            read()
    assert not list(tmp_path.glob("file*"))


def test_damage_is_noticed_by_digest_and_size(store: Store, tmp_path: Path) -> None:
    store.put_if_absent("shard", b"content")
    target = tmp_path / "file"
    target.write_bytes(b"precious")
    with pytest.raises(IntegrityError, match="expected sha256"):
        store.download("shard", target, sha256=sha256_of(b"promised"))
    with pytest.raises(IntegrityError, match="expected sha256"):
        store.read("shard", sha256=sha256_of(b"promised"))
    with pytest.raises(IntegrityError, match="expected 6 bytes, found 7"):
        store.download("shard", target, expect=ObjectInfo("shard", 6, None))
    assert target.read_bytes() == b"precious"
    assert store.download("shard", target, sha256=sha256_of(b"content")).checked_by == "sha256"


def test_files_come_together_as_they_do_alone(store: Store, tmp_path: Path) -> None:
    contents = {f"file-{number:02d}": bytes([number]) * (number * 999) for number in range(11)}
    for key, content in contents.items():
        store.put_if_absent(key, content)
    listed = store.list()
    transfers = store.download_all([(info, tmp_path / "new" / info.key) for info in listed])
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == contents
    assert [transfer.sha256 for transfer in transfers] == [sha256_of(content) for content in contents.values()]
    assert list(transfers) == [store.download(info.key, tmp_path / "one", expect=info) for info in listed]
    assert store.download_all([]) == ()


def test_more_files_come_than_may_be_open(store: Store, tmp_path: Path) -> None:
    store.put_if_absent("one", b"1")
    info = store.list()[0]
    store.download(info.key, tmp_path / "warm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 64, hard))
    try:
        assert len(store.download_all([(info, tmp_path / str(number)) for number in range(100)])) == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_does_not_come_leaves_no_part_of_any(store: Store, tmp_path: Path) -> None:
    store.put_if_absent("first", b"1")
    files = [(store.head("first"), tmp_path / "first"), (ObjectInfo("second", 1, None), tmp_path / "second")]
    with pytest.raises(ObjectNotFoundError, match="second"):
        store.download_all(files)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"first"}


def test_large_objects_are_not_read_into_memory(store: Store) -> None:
    store.put_if_absent("big", b"x" * 1000)
    assert len(store.read("big", max_bytes=1000)) == 1000
    with pytest.raises(StorageError, match="1000 bytes, at most 999"):
        store.read("big", max_bytes=999)


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_are_names_like_others(store: Store, key: str) -> None:
    store.put_if_absent(key, key.encode())
    assert [info.key for info in store.list()] == [key]
    assert store.read(key) == key.encode()
    store.copy(key, store, f"copies/{key}", size=len(key.encode()))
    assert store.read(f"copies/{key}") == key.encode()
    store.delete([key, f"copies/{key}"])
    assert store.list() == []


@pytest.mark.parametrize(
    "key", ["", "/abs", "a//b", "../up", "a/../b", "a/.", "a/", "a\\b", "nul\0", "\ud800", "k" * 1025]
)
def test_hostile_keys_are_refused(store: Store, key: str) -> None:
    for use in (
        lambda: store.head(key),
        lambda: store.read(key),
        lambda: store.put_if_absent(key, b""),
        lambda: store.replace(key, b"", if_match=None),
        lambda: store.delete([key]),
        lambda: store.list(f"{key}/x"),
    ):
        with pytest.raises(UsageError, match="can't be used"):
            use()


def test_copies_are_verified_and_repeatable(store: Store) -> None:
    store.put_if_absent("a", b"content")
    for _ in range(2):
        copied = store.copy("a", store, "backup/a", size=7, sha256=sha256_of(b"content"))
        assert copied.checked_by in {"sha256", "etag"}
    assert store.read("backup/a") == b"content"
    with pytest.raises(IntegrityError, match="expected 8 bytes, found 7"):
        store.copy("a", store, "backup/b", size=8)
    store.put_if_absent("c", b"another")
    with pytest.raises(IntegrityError):
        store.copy("c", store, "backup/a", size=7)
    assert store.read("backup/a") == b"content"


def test_copies_cross_kinds_of_store(store: Store, tmp_path: Path) -> None:
    other = open_store(str(tmp_path / "other"))
    store.put_if_absent("a", b"content")
    store.copy("a", other, "b", size=7, sha256=sha256_of(b"content"))
    other.copy("b", store, "c", size=7)
    assert store.read("c") == b"content"


def test_a_store_travels_to_other_processes(store: Store) -> None:
    store.put_if_absent("a", b"content")
    twin = pickle.loads(pickle.dumps(store))  # noqa: S301  # our own bytes
    assert twin.uri == store.uri
    assert twin.read("a") == b"content"


def test_marks_of_content_follow_content(store: Store) -> None:
    store.put_if_absent("a", b"same")
    store.put_if_absent("b", b"same")
    store.put_if_absent("c", b"else")
    a, b, c = (store.identify(info) for info in store.list())
    assert a == b != c


def test_probe_accepts_real_stores_and_leaves_nothing(store: Store) -> None:
    store.probe_conditional_writes()
    assert store.list() == []


def test_bytes_are_counted(store: Store) -> None:
    store.put_if_absent("a", b"12345")
    store.read("a")
    store.copy("a", store, "b", size=5)
    counts = store.counters.snapshot()
    assert (counts.bytes_up >= 5, counts.bytes_down, counts.bytes_copied) == (True, 5, 5)


def race(work: Callable[[int], str]) -> Counter[str]:
    """Let all writers start at one moment and count how they end."""
    barrier = Barrier(WRITERS)

    def run(writer: int) -> str:
        barrier.wait()
        return work(writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        return Counter(pool.map(run, range(WRITERS)))


def create(store: Store, key: str, writer: int) -> str:
    try:
        return "won" if store.put_if_absent(key, f"{writer:02d}".encode()) else "same"
    except IntegrityError:
        return "lost"


def swap(store: Store, etag: str, data: bytes) -> str:
    try:
        store.replace("state.json", data, if_match=etag)
    except PreconditionError:
        return "lost"
    return "won"
