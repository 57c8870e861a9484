"""Faults between client and server: nothing is wrong silently, and what a retry can mend is mended."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.errors import IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.storage import S3Store, Store, TransferLimits, open_store
from dflash.storage.files import file_sha256
from embedded.seaweedfs import SeaweedServer
from tests.storage.proxy import Fault, Kind, Proxy, run_proxy

MIB = 1 << 20
DATA = os.urandom(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
ALWAYS = 1000
LIMITS = TransferLimits(
    multipart_threshold_bytes=6 * MIB,
    part_bytes=5 * MIB,
    copy_threshold_bytes=6 * MIB,
    copy_part_bytes=5 * MIB,
    read_timeout_s=1,
    list_page_keys=10,
    attempts=3,
    first_wait_s=0.01,
    max_wait_s=0.05,
)
DAMAGED_GETS: list[Kind] = ["cut", "flip_down", "lose_reply", "unavailable", "stall", "reset"]


@pytest.fixture
def proxy(s3_server: SeaweedServer) -> Iterator[Proxy]:
    with run_proxy(s3_server.credentials) as running:
        yield running


@pytest.fixture
def faulty(proxy: Proxy, s3_server: SeaweedServer) -> Store:
    """A store behind the proxy."""
    return open_store(f"{s3_server.uri}/faults-{uuid.uuid4().hex}", proxy.credentials, LIMITS)


@pytest.fixture
def direct(faulty: Store, s3_server: SeaweedServer) -> Store:
    """The same store, seen past the proxy."""
    assert isinstance(faulty, S3Store)
    return S3Store(faulty.location, s3_server.credentials, LIMITS)


@pytest.mark.parametrize("kind", DAMAGED_GETS)
@pytest.mark.parametrize("sha256", [SHA256, None], ids=["manifest", "listing"])
def test_a_damaged_download_is_tried_again(
    proxy: Proxy, faulty: Store, tmp_path: Path, kind: Kind, sha256: str | None
) -> None:
    faulty.put_if_absent("object", DATA)
    info = faulty.list()[0]
    proxy.faults.append(Fault(kind, "^GET .*object$"))
    transfer = faulty.download("object", tmp_path / "file", expect=info, sha256=sha256)
    assert transfer.checked_by == ("etag" if sha256 is None else "sha256")
    assert (tmp_path / "file").read_bytes() == DATA
    assert faulty.counters.snapshot().retries == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", DAMAGED_GETS)
def test_a_damaged_file_among_others_is_tried_again(proxy: Proxy, faulty: Store, tmp_path: Path, kind: Kind) -> None:
    for key in "abc":
        faulty.put_if_absent(key, key.encode() + DATA)
    proxy.faults.append(Fault(kind, "^GET .*/b$"))
    transfers = faulty.download_all([(info, tmp_path / info.key) for info in faulty.list()])
    assert [transfer.checked_by for transfer in transfers] == ["etag"] * 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {key: key.encode() + DATA for key in "abc"}
    assert faulty.counters.snapshot().retries == 1


def test_lasting_damage_among_others_is_an_error(proxy: Proxy, faulty: Store, tmp_path: Path) -> None:
    for key in "abc":
        faulty.put_if_absent(key, key.encode() + DATA)
    proxy.faults.append(Fault("flip_down", "^GET .*/b$", times=ALWAYS))
    with pytest.raises(IntegrityError, match="/b: expected MD5"):
        faulty.download_all([(info, tmp_path / info.key) for info in faulty.list()])
    assert {path.name for path in tmp_path.iterdir()} <= {"a"}


def test_etags_of_encrypted_objects_cost_no_second_download(
    proxy: Proxy, faulty: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in "ab":
        faulty.put_if_absent(key, key.encode() + DATA)
    listed = [(faulty.head(key), tmp_path / key) for key in "ab"]
    monkeypatch.setattr("dflash.storage.s3.files_md5", lambda paths: ["0" * 32 for _ in paths])
    monkeypatch.setattr(faulty._control, "is_encrypted_by_key", lambda _: True)
    proxy.requests.clear()
    assert [transfer.checked_by for transfer in faulty.download_all(listed)] == ["size"] * 2
    assert (tmp_path / "b").read_bytes() == b"b" + DATA
    assert sum(request.startswith("GET ") for request in proxy.requests) == 2


@pytest.mark.parametrize("kind", ["cut", "flip_down"])
def test_lasting_damage_is_an_error_and_no_file(proxy: Proxy, faulty: Store, tmp_path: Path, kind: Kind) -> None:
    faulty.put_if_absent("object", DATA)
    proxy.faults.append(Fault(kind, "^GET .*object$", times=ALWAYS))
    with pytest.raises(IntegrityError, match="object"):
        faulty.download("object", tmp_path / "file")
    with pytest.raises(IntegrityError, match="object"):
        faulty.read("object")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["lose_reply", "unavailable", "stall", "flip_up"])
def test_a_create_survives_its_reply(proxy: Proxy, faulty: Store, direct: Store, kind: Kind) -> None:
    proxy.faults.append(Fault(kind, "^PUT "))
    faulty.put_if_absent("object", DATA)
    assert direct.read("object", sha256=SHA256) == DATA


@pytest.mark.parametrize("kind", ["lose_reply", "unavailable", "stall", "flip_up"])
def test_a_replace_survives_its_reply(proxy: Proxy, faulty: Store, direct: Store, kind: Kind) -> None:
    etag = faulty.replace("state.json", b"first", if_match=None)
    proxy.faults.append(Fault(kind, "^PUT "))
    assert faulty.replace("state.json", b"second", if_match=etag) == direct.head("state.json").etag
    assert direct.read("state.json") == b"second"


def test_a_lost_reply_is_told_from_a_real_conflict(proxy: Proxy, faulty: Store, direct: Store) -> None:
    etag = faulty.replace("state.json", b"first", if_match=None)
    direct.replace("state.json", b"of another", if_match=etag)
    proxy.faults.append(Fault("lose_reply", "^PUT "))
    with pytest.raises(PreconditionError, match="read it again"):
        faulty.replace("state.json", b"second", if_match=etag)
    assert direct.read("state.json") == b"of another"


def test_a_page_that_arrives_empty_loses_no_keys(proxy: Proxy, faulty: Store) -> None:
    for number in range(25):
        faulty.put_if_absent(f"key-{number:02d}", b"x")
    proxy.faults.append(Fault("empty_page", "continuation-token"))
    assert len(faulty.list()) == 25
    proxy.faults.append(Fault("cut", "list-type"))
    assert len(faulty.list()) == 25


def test_a_listing_that_never_agrees_is_an_error(proxy: Proxy, faulty: Store) -> None:
    for number in range(15):
        faulty.put_if_absent(f"key-{number:02d}", b"x")
    proxy.faults += [
        Fault("empty_page", "continuation-token.*max-keys=9|max-keys=9&.*continuation-token", times=ALWAYS)
    ]
    proxy.faults += [Fault("empty_page", "max-keys=9(&|$)", times=ALWAYS)]
    with pytest.raises(IntegrityError, match="two listings differ"):
        faulty.list()


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("lose_reply", r"^POST .*uploads"),
        ("lose_reply", r"^PUT .*partNumber=2"),
        ("flip_up", r"^PUT .*partNumber=2"),
        ("unavailable", r"^PUT .*partNumber=1"),
        ("lose_reply", r"^POST .*uploadId="),
        ("unavailable", r"^POST .*uploadId="),
        ("error_200", r"^POST .*uploadId="),
    ],
)
def test_an_upload_in_parts_survives(proxy: Proxy, faulty: Store, direct: Store, kind: Kind, pattern: str) -> None:
    data = DATA * 40
    proxy.faults.append(Fault(kind, pattern))
    faulty.put_if_absent("big", data)
    assert proxy.faults[0].times == 0
    assert direct.read("big", sha256=hashlib.sha256(data).hexdigest()) == data


def test_an_upload_in_parts_that_fails_leaves_nothing(proxy: Proxy, faulty: Store, direct: Store) -> None:
    proxy.faults.append(Fault("unavailable", r"^PUT .*partNumber=2", times=ALWAYS))
    with pytest.raises(StorageError, match="big"):
        faulty.put_if_absent("big", DATA * 40)
    assert direct.list_uploads() == ()
    assert direct.list() == []


@pytest.fixture
def large_file(tmp_path: Path) -> tuple[Path, str]:
    """A file that one request takes, and its SHA-256."""
    path = tmp_path / "large"
    path.write_bytes(DATA * 40)
    return path, file_sha256(path)


@pytest.mark.parametrize("kind", ["lose_reply", "flip_up", "unavailable", "reset", "error_200"])
def test_a_file_in_one_request_survives(
    proxy: Proxy, faulty: Store, direct: Store, large_file: tuple[Path, str], kind: Kind
) -> None:
    path, sha256 = large_file
    proxy.faults.append(Fault(kind, "^PUT .*/big$"))
    is_new = faulty.put_if_absent("big", path, sha256=sha256)
    assert is_new == (kind not in {"lose_reply", "error_200"})  # of these the second try finds it there
    assert proxy.faults[0].times == 0
    assert direct.verify("big", sha256=sha256).size == path.stat().st_size
    assert sum(request.startswith("PUT ") for request in proxy.requests) == (
        1 if kind == "reset" else 2
    )  # a reply without a body has no middle


def test_a_file_that_is_always_damaged_on_its_way_is_not_stored(
    proxy: Proxy, faulty: Store, direct: Store, large_file: tuple[Path, str]
) -> None:
    path, sha256 = large_file
    proxy.faults.append(Fault("flip_up", "^PUT .*/big$", times=ALWAYS))
    with pytest.raises(StorageError, match="big"):
        faulty.put_if_absent("big", path, sha256=sha256)
    assert direct.list() == []


def test_a_file_is_read_back_where_the_server_tells_nothing_of_its_digest(
    proxy: Proxy, faulty: Store, direct: Store, large_file: tuple[Path, str]
) -> None:
    path, sha256 = large_file
    proxy.tells_digests = False
    assert faulty.put_if_absent("big", path, sha256=sha256)
    assert any(request.startswith("GET ") and request.endswith("/big") for request in proxy.requests)
    proxy.faults.append(Fault("flip_down", "^GET .*/other$", times=ALWAYS))
    with pytest.raises(IntegrityError, match="other"):
        faulty.put_if_absent("other", path, sha256=sha256)
    assert [info.key for info in direct.list()] == ["big"]


@pytest.mark.parametrize("size", [300_000, 12_000_000])
@pytest.mark.parametrize("kind", ["lose_reply", "unavailable", "error_200"])
def test_a_copy_survives_its_reply(proxy: Proxy, faulty: Store, direct: Store, kind: Kind, size: int) -> None:
    data = (DATA * 40)[:size]
    faulty.put_if_absent("a", data)
    proxy.faults.append(Fault(kind, r"^PUT .*/b(\?|$)"))
    proxy.faults.append(Fault(kind, r"^POST .*/b\?uploadId="))
    faulty.copy("a", faulty, "b", size=size, sha256=hashlib.sha256(data).hexdigest())
    assert direct.read("b") == data


def test_deletes_survive_their_reply(proxy: Proxy, faulty: Store, direct: Store) -> None:
    faulty.put_if_absent("a", b"x")
    proxy.faults.append(Fault("lose_reply", "^(POST|DELETE) "))
    faulty.delete(["a"])
    with pytest.raises(ObjectNotFoundError):
        direct.head("a")
