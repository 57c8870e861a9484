"""What the S3 clients raise, in the project's terms."""

from __future__ import annotations

import re

import obstore.exceptions

from dflash.errors import IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.storage.retry import Failure

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET = {"NoSuchBucket"}
_REFUSED = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_NOT_FOUND = {"NoSuchKey", "NoSuchUpload", "NotFound"}
# What a server says of a body whose digest isn't the one in the request.
DIGEST_REFUSALS = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_AGAIN = DIGEST_REFUSALS | {
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
}
_AGAIN_STATUS = {408, 409, 425, 429}
_LOST = (obstore.exceptions.PreconditionError, obstore.exceptions.AlreadyExistsError)


def classify(error: BaseException, where: str, bucket: str) -> Failure | None:
    """Translate an exception of obstore or botocore.

    Args:
        error: what was raised.
        where: the URI that was worked on.
        bucket: its bucket.

    Returns:
        The failure; None for what is no matter of storage (interrupts, errors of ours in bad calls).
    """
    if isinstance(error, IntegrityError):
        return Failure(error, is_transient=True)
    if isinstance(error, StorageError):
        return Failure(error, is_transient=False)
    if type(error).__name__ == "PanicException":
        return Failure(StorageError(f"{where}: the S3 client panicked: {error}"), is_transient=True)
    if isinstance(error, FileNotFoundError | obstore.exceptions.BaseError):
        text = str(error).split("Debug source", maxsplit=1)[0].strip()
        return _from_reply(where, bucket, _found(_STATUS, text), _found(_CODE, text), text, error)
    return _classify_botocore(error, where, bucket)


def _classify_botocore(error: BaseException, where: str, bucket: str) -> Failure | None:
    if not type(error).__module__.startswith(("botocore", "urllib3")):
        return None
    response = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    return _from_reply(where, bucket, status, "" if code.isdigit() else code, str(error), error)


def _from_reply(where: str, bucket: str, status: str, code: str, text: str, error: BaseException) -> Failure:
    number = int(status) if status else 0
    is_transient = False
    made: StorageError
    if code in _NO_BUCKET:
        made = StorageError(f"{where}: bucket {bucket!r} does not exist; create it or correct the URI")
    elif code in _REFUSED or number in {401, 403}:
        made = StorageError(
            f"{where}: access refused ({code or number}); check the access key, its secret and its rights"
        )
    elif code in _AGAIN or number in _AGAIN_STATUS or number >= 500:
        made, is_transient = StorageError(f"{where}: the server failed ({number} {code}): {text}"), True
    elif isinstance(error, FileNotFoundError) or code in _NOT_FOUND or number == 404:
        made = ObjectNotFoundError(f"{where}: no such object")
    elif code == "PreconditionFailed" or number == 412 or isinstance(error, _LOST):
        made = PreconditionError(f"{where}: the object was replaced or written by another")
    elif number >= 400:
        made = StorageError(f"{where}: the server refused ({number} {code}): {text}")
    else:
        # No HTTP error: connections refused, cut or stalled, and replies that can't be parsed.
        made, is_transient = StorageError(f"{where}: the transfer broke: {text}"), True
    return Failure(made, is_transient)


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match.group(1) if match else ""
