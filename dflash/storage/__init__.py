"""Object stores and folders behind one interface; the only package that knows an object store SDK.

Open one with `open_store("s3://bucket/prefix", credentials)` or `open_store("folder")`; the contract is `Store`.
"""

from __future__ import annotations

from dflash.storage.local import LocalStore
from dflash.storage.location import Location, join_uri, parse_uri
from dflash.storage.retry import TransferLimits
from dflash.storage.s3 import S3Store
from dflash.storage.s3_clients import S3Credentials
from dflash.storage.store import ObjectInfo, Store, Transfer, TransferCounters, TransferCounts, UploadInfo

__all__ = [
    "LocalStore",
    "Location",
    "ObjectInfo",
    "S3Credentials",
    "S3Store",
    "Store",
    "Transfer",
    "TransferCounters",
    "TransferCounts",
    "TransferLimits",
    "UploadInfo",
    "join_uri",
    "open_store",
    "parse_uri",
]


def open_store(uri: str, credentials: S3Credentials | None = None, limits: TransferLimits | None = None) -> Store:
    """Open a store rooted at a URI; nothing is contacted or created yet.

    Args:
        uri: `s3://bucket/prefix`, a local path (absolute or relative) or `file:///path`.
        credentials: for S3; None takes the client's own chain (instance role, profile, AWS variables).
        limits: sizes, deadlines and retries; None takes the defaults.

    Raises:
        UsageError: the URI names no store that is known here.
    """
    location = parse_uri(uri)
    if location.scheme == "s3":
        return S3Store(location, credentials or S3Credentials(), limits or TransferLimits())
    return LocalStore(location.path)
