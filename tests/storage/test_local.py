"""What only a folder has: links, part files, permissions, and writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.errors import PreconditionError, StorageError, UsageError
from dflash.storage import LocalStore, UploadInfo, open_store

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from dflash.storage.files import lock_path
from dflash.storage.local import _lock
with _lock(lock_path(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> LocalStore:
    store = open_store(str(tmp_path / "store"))
    assert isinstance(store, LocalStore)
    store.put_if_absent("inside/file", b"x")
    return store


def test_links_that_leave_the_root_are_refused(folder: LocalStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (folder.root / "link").symlink_to(secret)
    (folder.root / "away").symlink_to(tmp_path)
    for use in (
        lambda: folder.read("link"),
        lambda: folder.head("link"),
        lambda: folder.download("away/secret", tmp_path / "copy"),
        lambda: folder.replace("link", b"x", if_match=None),
        lambda: folder.put_if_absent("away/new", b"x"),
        lambda: folder.delete(["away/secret"]),
        lambda: folder.copy("link", folder, "stolen", size=6),
    ):
        with pytest.raises(UsageError, match="a link leads out of"):
            use()
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "expected a file"),
        (lambda path: path.symlink_to(path.parent / "nothing"), "expected a file"),
        (lambda path: path.symlink_to(path), "leads to itself"),
    ],
)
def test_what_is_no_file_is_named(folder: LocalStore, make: Callable[[Path], None], message: str) -> None:
    folder.root.mkdir(exist_ok=True)
    make(folder.root / "part.jsonl")
    with pytest.raises(UsageError, match=rf"part\.jsonl(.|\n)*{message}"):
        folder.list()


def test_no_listing_passes_over_a_link_in_silence(folder: LocalStore, tmp_path: Path) -> None:
    (folder.root / "linked").symlink_to(folder.root / "inside")
    with pytest.raises(UsageError, match="links to folders are not followed"):
        folder.list()
    (folder.root / "linked").unlink()
    (folder.root / "file").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError, match="a link leads out of"):
        folder.list()


def test_a_root_that_is_a_link_is_what_it_points_to(folder: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder.root)
    assert open_store(str(tmp_path / "alias")).read("inside/file") == b"x"
    assert [info.key for info in open_store(str(tmp_path / "alias")).list()] == ["inside/file"]


def test_part_files_are_unfinished_uploads_not_objects(folder: LocalStore) -> None:
    part = folder.root / "inside" / ".shard.arrow.12-0-abcd.part"
    part.write_bytes(b"half")
    assert [info.key for info in folder.list()] == ["inside/file"]
    upload = UploadInfo("inside/shard.arrow", part.name)
    assert folder.list_uploads() == folder.list_uploads("inside") == (upload,)
    folder.abort_upload(upload)
    folder.abort_upload(upload)
    assert folder.list_uploads() == ()
    with pytest.raises(UsageError, match="names no unfinished upload"):
        folder.abort_upload(UploadInfo("inside/file", "file"))
    with pytest.raises(UsageError, match="part files"):
        folder.put_if_absent("inside/.x.part", b"")


def test_a_copy_shares_no_bytes_with_its_source(folder: LocalStore) -> None:
    folder.copy("inside/file", folder, "backup/file", size=1)
    assert not (folder.root / "inside/file").samefile(folder.root / "backup/file")


def test_a_killed_holder_frees_its_lock(folder: LocalStore) -> None:
    etag = folder.replace("state.json", b"1", if_match=None)
    command = [sys.executable, "-c", HOLDER, str(folder.root / "state.json")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        started = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        folder.replace("state.json", b"2", if_match=etag)
        assert time.monotonic() - started < 10
    assert folder.read("state.json") == b"2"


def test_a_file_replaced_behind_the_back_is_a_conflict(folder: LocalStore) -> None:
    etag = folder.replace("state.json", b"1", if_match=None)
    (folder.root / "state.json").write_bytes(b"by hand")
    with pytest.raises(PreconditionError):
        folder.replace("state.json", b"2", if_match=etag)


def test_failures_of_the_file_system_are_storage_errors(folder: LocalStore, tmp_path: Path) -> None:
    for use in (
        lambda: folder.put_if_absent("inside/file/below", b"x"),
        lambda: folder.replace("inside", b"x", if_match=None),
        lambda: folder.read("inside"),
        lambda: folder.download("inside/file", Path("/proc/no/such")),
        lambda: folder.delete(["inside"]),
        lambda: open_store("/proc/no/such").probe_conditional_writes(),
    ):
        with pytest.raises(StorageError):
            use()
    assert folder.list_uploads() == ()
