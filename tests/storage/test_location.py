"""URIs and keys are taken apart exactly, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import UsageError
from dflash.storage import LocalStore, Location, S3Store, join_uri, open_store, parse_uri
from dflash.storage.location import check_key


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("s3://bucket/prefix/deep", Location("s3", "bucket", "prefix/deep")),
        ("s3://bucket/prefix/", Location("s3", "bucket", "prefix")),
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3://bucket/", Location("s3", "bucket", "")),
        ("s3://bucket/with space?x#y%20z", Location("s3", "bucket", "with space?x#y%20z")),
        ("/data/sets", Location("file", "", "/data/sets")),
        ("file:///data/my%20sets", Location("file", "", "/data/my sets")),
        ("file://localhost/data", Location("file", "", "/data")),
    ],
)
def test_uris_that_name_a_place(uri: str, location: Location) -> None:
    assert parse_uri(uri) == location
    assert parse_uri(location.uri) == location


def test_a_relative_path_is_made_absolute() -> None:
    assert parse_uri("data/sets").path == str(Path.cwd() / "data" / "sets")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "  ",
        "s3:/bucket/prefix",
        "s3:bucket",
        "S3:bucket",
        "s3://",
        "s3:///prefix",
        "s3://Bucket/prefix",
        "s3://b/prefix",
        "s3://user@bucket/prefix",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "http://bucket/prefix",
        "gs://bucket",
        "file://host/path",
        "file://relative",
        "file:///nul%00",
        "data\nsets",
        "nul\0",
        "\ud800",
    ],
)
def test_uris_that_name_none_are_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="URI"):
        parse_uri(uri)


def test_opening_follows_the_scheme(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert open_store("s3://bucket/prefix/", _keys()).uri == "s3://bucket/prefix"
    assert isinstance(open_store("s3://bucket", _keys()), S3Store)


def test_joining_keeps_single_slashes_and_checks_parts() -> None:
    assert join_uri("s3://bucket/root/", "manifests", "1.json") == "s3://bucket/root/manifests/1.json"
    assert join_uri("/", "data") == "/data"
    with pytest.raises(UsageError, match=r"\.\."):
        join_uri("s3://bucket/root", "../other")


@given(st.text(max_size=30))
def test_a_key_that_passes_stays_inside_its_root(key: str) -> None:
    try:
        check_key(key)
    except UsageError:
        return
    root = Path("/root/of/store")
    inside = Path(*[part for part in (root / key).parts if part != "."])
    assert ".." not in inside.parts
    assert inside.is_relative_to(root)
    assert inside != root
    assert "/".join(inside.parts[len(root.parts) :]) == key


def _keys() -> object:
    from pydantic import SecretStr

    from dflash.storage import S3Credentials

    return S3Credentials(access_key_id="a", secret_access_key=SecretStr("b"))
