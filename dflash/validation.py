"""Checks that run models share, and what pydantic found wrong with a document, for messages."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from pydantic import ValidationError

_SHOWN = 5
_NO_ADDRESS: Final = re.compile(r"[\s\x00-\x1f\x7f\\]")  # in a URL each of them is a slip of the keyboard


def check_address(url: str) -> str:
    """Return the address of a server unchanged, if it is one and holds no secret.

    What a message may show is shown: parameters, messages and manifests hold addresses, so a password in one is
    refused without repeating it.

    Raises:
        ValueError: not http or https, no host or port, or a user, a password or a query in it.
    """
    if "@" in url or "?" in url or "#" in url:
        raise ValueError("an address holds no user, password or query: keys come from the environment")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or _NO_ADDRESS.search(url):
        raise ValueError(f"{url!r} is no http:// or https:// address")
    if parts.port == 0:  # reading it refuses what is no number up to 65535
        raise ValueError(f"{url!r}: nothing listens at port 0")
    return url


def problems_of(error: ValidationError, whole: str = "") -> str:
    """The first five problems, each with its place; `whole` stands for the document itself."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in error.errors()[:_SHOWN])
