"""What only S3 has: credentials, buckets, uploads and copies in parts, and settings that leak in from outside."""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from dflash.errors import IntegrityError, StorageError, UsageError
from dflash.storage import S3Credentials, S3Store, Store, TransferLimits, UploadInfo, open_store
from dflash.storage.files import file_sha256
from embedded.seaweedfs import SeaweedServer

MIB = 1 << 20
IN_PARTS = TransferLimits(
    multipart_threshold_bytes=6 * MIB,
    part_bytes=5 * MIB,
    copy_threshold_bytes=6 * MIB,
    copy_part_bytes=5 * MIB,
    first_wait_s=0.01,
    max_wait_s=0.05,
)


@pytest.fixture
def parts_store(s3_server: SeaweedServer) -> Store:
    return open_store(f"{s3_server.uri}/parts-{uuid.uuid4().hex}", s3_server.credentials, IN_PARTS)


@pytest.fixture(scope="session")
def boto3_client(s3_server: SeaweedServer) -> Any:
    """An independent client, to look at the server from outside."""
    import boto3
    from botocore.config import Config

    secret = s3_server.credentials.secret_access_key
    assert secret is not None
    return boto3.session.Session().client(
        "s3",
        endpoint_url=s3_server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=s3_server.credentials.access_key_id,
        aws_secret_access_key=secret.get_secret_value(),
        config=Config(s3={"addressing_style": "path"}),
    )


def test_large_files_go_in_parts_and_come_back_whole(parts_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(12 * MIB))
    assert parts_store.put_if_absent("big", source)
    assert not parts_store.put_if_absent("big", source)
    assert (parts_store.head("big").etag or "").endswith("-3")
    transfer = parts_store.download("big", tmp_path / "back")
    assert transfer.checked_by == "size"
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    copied = parts_store.copy("big", parts_store, "copy", size=12 * MIB, sha256=transfer.sha256)
    assert copied.checked_by == "sha256"
    assert parts_store.read("copy") == source.read_bytes()
    assert parts_store.list_uploads() == ()


def test_a_large_file_of_known_digest_is_one_object_that_the_server_compared(
    parts_store: Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(12 * MIB))
    sha256 = file_sha256(source)
    with pytest.raises(IntegrityError, match=r"source of .*big: expected sha256 0000"):
        parts_store.put_if_absent("big", source, sha256="0" * 64)
    assert parts_store.list() == []
    assert parts_store.counters.snapshot().retries == 0  # what is damaged here isn't sent again
    for wrong in ("", "no hex", "g" * 64, "ab" * 31):
        with pytest.raises(IntegrityError, match="expected sha256"):
            parts_store.put_if_absent("big", source, sha256=wrong)
    with pytest.raises(StorageError, match=r"source .*missing: the file system failed"):
        parts_store.put_if_absent("big", tmp_path / "missing", sha256=sha256)
    assert parts_store.put_if_absent("big", source, sha256=sha256.upper())
    assert not parts_store.put_if_absent("big", source, sha256=sha256)
    assert parts_store.download("big", tmp_path / "back").checked_by == "etag"
    assert parts_store.copy("big", parts_store, "copy", size=12 * MIB, sha256=sha256).checked_by == "sha256"
    assert parts_store.counters.snapshot().bytes_up == 12 * MIB
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_many_large_files_at_once_all_arrive(s3_server: SeaweedServer, tmp_path: Path) -> None:
    """The embedded server lets 64 MB in at a time and closes what waits; so not all are sent at once."""
    store = open_store(f"{s3_server.uri}/many-{uuid.uuid4().hex}", s3_server.credentials)
    source = tmp_path / "source"
    source.write_bytes(bytes(70 * MIB))
    sha256 = file_sha256(source)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: store.put_if_absent(f"{number}", source, sha256=sha256), range(8)))
    assert {info.size for info in store.list()} == {70 * MIB}
    store.delete([info.key for info in store.list()])


def test_larger_files_than_one_request_takes_go_in_parts(parts_store: Store, tmp_path: Path) -> None:
    assert isinstance(parts_store, S3Store)
    limits = dataclasses.replace(IN_PARTS, single_put_max_bytes=7 * MIB)
    store = S3Store(parts_store.location, parts_store.credentials, limits)
    for size, etag in ((7 * MIB, r"\w{32}"), (7 * MIB + 1, r"\w{32}-2")):
        source = tmp_path / "source"
        source.write_bytes(bytes(size))
        store.put_if_absent(f"of-{size}", source, sha256=file_sha256(source))
        assert re.fullmatch(etag, store.head(f"of-{size}").etag or "")


def test_of_files_that_race_for_a_key_one_wins(parts_store: Store, tmp_path: Path) -> None:
    barrier = Barrier(4)
    sources = [tmp_path / str(writer) for writer in range(4)]
    for writer, source in enumerate(sources):
        source.write_bytes(bytes([writer]) * (7 * MIB))

    def put(key: str, source: Path) -> bool:
        barrier.wait()
        try:
            return parts_store.put_if_absent(key, source, sha256=file_sha256(source))
        except IntegrityError:
            return False

    with ThreadPoolExecutor(len(sources)) as pool:
        for key in ("first", "second", "third"):
            won = list(pool.map(lambda source, key=key: put(key, source), sources))
            assert sum(won) == 1
            assert parts_store.read(key) == sources[won.index(True)].read_bytes()


@pytest.mark.parametrize("is_same", [True, False])
def test_large_uploads_that_race_leave_one_whole_object(parts_store: Store, is_same: bool) -> None:
    sources = [bytes([0 if is_same else writer]) * (7 * MIB) for writer in range(3)]

    def put(source: bytes) -> str:
        try:
            return "won" if parts_store.put_if_absent("big", source) else "same"
        except IntegrityError:
            return "lost"

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(put, sources))
    # This server checks the condition of a completion, yet not atomically: of different contents two may report to have
    # won. Large keys are named after their content, so only equal content meets.
    assert "won" in outcomes
    assert not (is_same and "lost" in outcomes)
    assert parts_store.read("big") in sources
    assert parts_store.list_uploads() == ()


def test_unfinished_uploads_are_listed_and_aborted(s3_store: S3Store, boto3_client: Any) -> None:
    bucket, prefix = s3_store.location.bucket, s3_store.location.path
    begun = boto3_client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/deep/shard")
    upload = UploadInfo("deep/shard", begun["UploadId"])
    assert s3_store.list_uploads() == s3_store.list_uploads("deep") == (upload,)
    assert s3_store.list_uploads("other") == ()
    s3_store.abort_upload(upload)
    s3_store.abort_upload(upload)
    assert s3_store.list_uploads() == ()


def test_folder_markers_are_no_objects(s3_store: S3Store, boto3_client: Any) -> None:
    boto3_client.put_object(Bucket=s3_store.location.bucket, Key=f"{s3_store.location.path}/folder/", Body=b"")
    s3_store.put_if_absent("folder/file", b"x")
    assert [info.key for info in s3_store.list()] == ["folder/file"]


def test_folders_are_listed_over_many_pages(s3_store: S3Store) -> None:
    store = S3Store(s3_store.location, s3_store.credentials, TransferLimits(list_page_keys=4))
    keys = [f"batch-{number}/{name}" for number in range(9) for name in ("a/b", "c")] + ["loose", "zebra"]
    for key in keys:
        store.put_if_absent(key, b"x")
    assert store.list_folders() == tuple(f"batch-{number}" for number in range(9))


def test_wrong_keys_are_refused_with_what_to_do(s3_server: SeaweedServer, tmp_path: Path) -> None:
    wrong_secret = s3_server.credentials.model_copy(update={"secret_access_key": SecretStr("wrong")})
    wrong_key = s3_server.credentials.model_copy(update={"access_key_id": "wrong"})
    for credentials in (wrong_secret, wrong_key):
        store = open_store(f"{s3_server.uri}/prefix", credentials)
        for attempt in (
            store.list,
            lambda s=store: s.head("a"),
            lambda s=store: s.put_if_absent("a", b"x"),
            lambda s=store: s.download("a", tmp_path / "a"),
        ):
            with pytest.raises(StorageError, match=r"access refused .*check the access key"):
                attempt()
        assert store.counters.snapshot().retries == 0


def test_a_missing_bucket_is_named(s3_server: SeaweedServer) -> None:
    store = open_store("s3://no-such-bucket/prefix", s3_server.credentials)
    for attempt in (
        store.list,
        lambda: store.put_if_absent("a", b"x"),
        lambda: store.replace("a", b"x", if_match=None),
        store.list_uploads,
        store.probe_conditional_writes,
    ):
        with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist"):
            attempt()


def test_a_server_that_is_down_is_tried_and_named() -> None:
    credentials = S3Credentials(endpoint_url="http://127.0.0.1:9", access_key_id="a", secret_access_key=SecretStr("b"))
    limits = TransferLimits(attempts=3, first_wait_s=0.01, connect_timeout_s=1)
    store = open_store("s3://bucket/prefix", credentials, limits)
    for attempt in (store.list, lambda: store.head("a"), lambda: store.put_if_absent("a", b"x")):
        with pytest.raises(StorageError, match=r"s3://bucket/prefix"):
            attempt()
    assert store.counters.snapshot().retries == 6


def test_nothing_leaks_in_from_the_environment(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of somebody else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    store = open_store(f"{s3_server.uri}/env-{uuid.uuid4().hex}", s3_server.credentials, TransferLimits(attempts=1))
    store.put_if_absent("a", b"x")
    assert [info.key for info in store.list()] == ["a"]


def test_without_keys_the_aws_chain_is_asked(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = s3_server.credentials.secret_access_key
    assert secret is not None
    bare = S3Credentials(endpoint_url=s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3_server.credentials.access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret.get_secret_value())
    store = open_store(f"{s3_server.uri}/chain-{uuid.uuid4().hex}", bare)
    store.put_if_absent("a", b"x")
    assert [info.key for info in store.list()] == ["a"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(UsageError, match="no S3 credentials"):
        open_store(f"{s3_server.uri}/chain", bare)


def test_credentials_come_in_pairs_and_hide_their_secret() -> None:
    with pytest.raises(ValidationError, match="together"):
        S3Credentials(access_key_id="a")
    with pytest.raises(ValidationError, match="session_token needs"):
        S3Credentials(session_token=SecretStr("t"))
    with pytest.raises(ValidationError):
        S3Credentials(endpoint_url="127.0.0.1:8333")
    for values in (
        {"endpoint_url": "http://user:hidden@127.0.0.1:8333"},
        {"endpoint_url": "user:hidden@127.0.0.1:8333"},
        {"access_key_id": "a", "secret_access_key": ["hidden"]},
        {"secret_access_key": "hidden"},
    ):
        with pytest.raises(ValidationError) as refused:
            S3Credentials.model_validate(values)
        assert "hidden" not in str(refused.value)
    credentials = S3Credentials(access_key_id="a", secret_access_key=SecretStr("hidden"))
    assert "hidden" not in f"{credentials!r}{credentials}{credentials.model_dump_json()}"


@pytest.mark.slow
def test_2500_keys_are_listed_over_real_pages(s3_server: SeaweedServer) -> None:
    store = open_store(f"{s3_server.uri}/pages-{uuid.uuid4().hex}", s3_server.credentials)
    keys = [f"many/{number:04d}" for number in range(2500)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda key: store.put_if_absent(key, b"x"), keys))
    assert [info.key for info in store.list()] == keys
    store.delete(keys)
    assert store.list() == []
