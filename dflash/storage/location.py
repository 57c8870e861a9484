"""URIs and keys: what they may look like, checked before anything is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from dflash.errors import UsageError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_KEY_BYTES = 1024  # the limit of S3, taken for folders too, so that a dataset can move between them


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed URI.

    Attributes:
        scheme: `s3` or `file`.
        bucket: the bucket; empty for `file`.
        path: the prefix inside the bucket, without slashes at its ends; for `file` the absolute path.
    """

    scheme: Literal["s3", "file"]
    bucket: str
    path: str

    @property
    def uri(self) -> str:
        """The URI in its one normal form."""
        if self.scheme == "file":
            return self.path
        return f"s3://{self.bucket}/{self.path}" if self.path else f"s3://{self.bucket}"


def parse_uri(uri: str) -> Location:
    """Parse `s3://bucket/prefix`, `file:///path` or a local path.

    Raises:
        UsageError: empty, another scheme, an impossible bucket name, `..` or control characters.
    """
    if not uri.strip():
        raise UsageError("an empty URI names no place: give s3://bucket/prefix or a local path")
    if _CONTROL.search(uri) or not _is_encodable(uri):
        raise UsageError(f"URI {uri!r} holds control characters or is not valid Unicode")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        if re.match(r"(?i)(s3[an]?|file|https?|gs|az|hf):", uri):
            raise UsageError(f"URI {uri!r} has no '//' after its scheme: write s3://bucket/prefix")
        return Location("file", "", str(Path(uri).absolute()))
    if scheme == "file":
        path = unquote(rest.removeprefix("localhost"))
        if not path.startswith("/") or _CONTROL.search(path):
            raise UsageError(f"URI {uri!r} is not an absolute local path: write file:///path")
        return Location("file", "", path)
    if scheme != "s3":
        raise UsageError(f"URI {uri!r}: scheme {scheme!r} is not known here; use s3://bucket/prefix or a local path")
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"URI {uri!r}: {bucket!r} is no bucket name (3 to 63 of a-z, 0-9, '.', '-')")
    prefix = prefix.strip("/")
    problem = _problem_of(prefix) if prefix else None
    if problem is not None:
        raise UsageError(f"URI {uri!r} can't be used: its prefix is refused, since {problem}")
    return Location("s3", bucket, prefix)


def join_uri(uri: str, *parts: str) -> str:
    """Append checked key parts to a URI, with single slashes between."""
    root = uri.rstrip("/") or "/"
    for part in parts:
        root = f"{root.rstrip('/')}/{check_key(part)}"
    return root


def check_key(key: str) -> str:
    """Return the key unchanged if it may name an object.

    Raises:
        UsageError: empty, absolute, with empty, `.` or `..` segments, backslashes, control characters, or too long.
    """
    problem = _problem_of(key)
    if problem is not None:
        raise UsageError(f"key {key!r} can't be used: {problem}")
    return key


def check_prefix(prefix: str) -> str:
    """Return a listing prefix without its trailing slash; the empty prefix is the store's root.

    Raises:
        UsageError: see `check_key`.
    """
    stripped = prefix.removesuffix("/")
    return check_key(stripped) if stripped else ""


def _problem_of(key: str) -> str | None:
    problem = None
    if not key:
        problem = "it is empty"
    elif _CONTROL.search(key):
        problem = "it holds control characters"
    elif not _is_encodable(key):
        problem = "it holds lone surrogates and has no UTF-8 form"
    elif "\\" in key:
        problem = "it holds a backslash, which servers store under another name"
    elif any(segment in {"", ".", ".."} for segment in key.split("/")):
        problem = "it has an empty, '.' or '..' segment"
    elif len(key.encode()) > _MAX_KEY_BYTES:
        problem = f"it has {len(key.encode())} bytes, the limit is {_MAX_KEY_BYTES}"
    return problem


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
