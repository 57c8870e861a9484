"""Retries with backoff around whole operations, and the limits of transfers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dflash.errors import StorageError

T = TypeVar("T")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Sizes, deadlines and retries of S3 transfers.

    Attributes:
        multipart_threshold_bytes: up to it an upload is one conditional PUT held in memory.
        single_put_max_bytes: up to it a larger file of known SHA-256 is one conditional PUT, streamed; all else goes in
            parts. S3 takes 5 GiB.
        part_bytes: size of an uploaded part; S3 refuses parts under 5 MiB other than the last.
        copy_threshold_bytes: larger server-side copies go in parts; S3 refuses single copies over 5 GiB.
        copy_part_bytes: size of a copied part.
        connect_timeout_s: longest wait for a connection.
        read_timeout_s: longest wait for the next bytes.
        copy_timeout_s: longest wait for the server to copy, to join parts or to take a streamed PUT; it is silent.
        object_timeout_s: longest time for one request with its body, a streamed PUT apart.
        list_page_keys: keys asked for in one page of a listing; S3 gives 1,000 at most.
        attempts: tries of one operation, the first included.
        first_wait_s: wait before the second try; doubles with each, with jitter.
        max_wait_s: longest wait between tries.
    """

    multipart_threshold_bytes: int = 32 * _MIB
    single_put_max_bytes: int = 256 * _MIB
    part_bytes: int = 16 * _MIB
    copy_threshold_bytes: int = 5 * 1024 * _MIB
    copy_part_bytes: int = 512 * _MIB
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 15.0
    copy_timeout_s: float = 600.0
    object_timeout_s: float = 1800.0
    list_page_keys: int = 1000
    attempts: int = 5
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in the project's terms, and whether another try may mend it."""

    error: StorageError
    is_transient: bool


def retry(
    operation: Callable[[], T],
    classify: Callable[[BaseException], Failure | None],
    limits: TransferLimits,
    on_retry: Callable[[], None],
) -> T:
    """Run an operation until it succeeds, fails for good, or the tries are used up.

    Args:
        operation: must be safe to repeat.
        classify: says what a raised exception means; None lets it through unchanged.
        limits: tries and waits.
        on_retry: called before each further try.

    Raises:
        StorageError: what `classify` made of the last failure.
    """
    for attempt in range(1, limits.attempts + 1):
        try:
            return operation()
        # A panic of the Rust client is a BaseException; classify lets interrupts and exits through.
        except BaseException as error:
            failure = classify(error)
            if failure is None:
                raise
            if not failure.is_transient or attempt == limits.attempts:
                if failure.error is error:
                    raise
                raise failure.error from error
        on_retry()
        time.sleep(min(limits.max_wait_s, limits.first_wait_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))
    raise AssertionError("limits.attempts is at least 1")
