"""What is tried again, what isn't, and what is none of the store's business."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from dflash.errors import IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.storage.retry import Failure, TransferLimits, retry
from dflash.storage.s3_failures import classify

QUICK = TransferLimits(attempts=3, first_wait_s=0.001)


class PanicException(BaseException):  # as the Rust client names it
    """A panic of the Rust client: no `Exception`."""


def reply(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Operation")


@pytest.mark.parametrize(
    ("error", "kind", "is_transient"),
    [
        (PanicException("poisoned"), StorageError, True),
        (IntegrityError("cut"), IntegrityError, True),
        (PreconditionError("lost"), PreconditionError, False),
        (ReadTimeoutError(endpoint_url="http://x"), StorageError, True),
        (reply(503, "SlowDown"), StorageError, True),
        (reply(500, ""), StorageError, True),
        (reply(409, "ConditionalRequestConflict"), StorageError, True),
        (reply(400, "BadDigest"), StorageError, True),
        (reply(400, "InvalidRequest"), StorageError, False),
        (reply(403, "403"), StorageError, False),
        (reply(404, "404"), ObjectNotFoundError, False),
        (reply(404, "NoSuchUpload"), ObjectNotFoundError, False),
        (reply(404, "NoSuchBucket"), StorageError, False),
        (reply(412, "PreconditionFailed"), PreconditionError, False),
        (FileNotFoundError("status code: 404"), ObjectNotFoundError, False),
    ],
)
def test_failures_are_told_apart(error: BaseException, kind: type[StorageError], is_transient: bool) -> None:
    failure = classify(error, "s3://bucket/key", "bucket")
    assert failure is not None
    assert type(failure.error) is kind
    assert failure.is_transient is is_transient


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError("a bug"), PermissionError("disk")])
def test_what_is_no_matter_of_storage_passes_through(error: BaseException) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        retry(fail, lambda e: classify(e, "s3://bucket/key", "bucket"), QUICK, lambda: None)
    assert raised.value is error
    assert len(calls) == 1


@pytest.mark.parametrize(("num_failures", "num_calls"), [(0, 1), (2, 3)])
def test_a_transient_failure_is_tried_again(num_failures: int, num_calls: int) -> None:
    calls, retries = [], []

    def work() -> int:
        calls.append(1)
        if len(calls) <= num_failures:
            raise PanicException
        return 42

    def transient(error: BaseException) -> Failure:
        return Failure(StorageError(repr(error)), is_transient=True)

    assert retry(work, transient, QUICK, lambda: retries.append(1)) == 42
    assert (len(calls), len(retries)) == (num_calls, num_failures)


def test_tries_end_with_the_translated_error_and_its_cause() -> None:
    def work() -> None:
        raise PanicException("poisoned")

    with pytest.raises(StorageError, match="panicked: poisoned") as raised:
        retry(work, lambda e: classify(e, "s3://bucket/key", "bucket"), QUICK, lambda: None)
    assert isinstance(raised.value.__cause__, PanicException)
