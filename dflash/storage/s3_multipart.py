"""Multipart uploads: parts with a SHA256 each, completed on condition, aborted on any failure."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import ObjectNotFoundError
from dflash.storage.files import os_errors_as_storage_errors

_MAX_PARTS = 10_000  # the limit of S3
_PARALLEL_PARTS = 4  # memory is this many parts; embedded servers slow down beyond it


@dataclass(slots=True)
class MultipartUpload:
    """One upload in parts that has begun.

    Attributes:
        client: a botocore S3 client.
        run: runs one request with retries and translated errors.
        target: bucket and key.
        upload_id: the server's name for it.
        parts: what the server said about each part, to be repeated at completion.
    """

    client: Any
    run: Callable[[Callable[[], Any]], Any]
    target: dict[str, str]
    upload_id: str
    parts: list[dict[str, Any]] = field(default_factory=list)

    def complete(self, *, if_none_match: bool) -> None:
        """Join the parts to an object.

        Raises:
            PreconditionError: the key was taken meanwhile.
            ObjectNotFoundError: the upload is gone: an earlier try succeeded and its reply was lost, or somebody
                aborted it.
        """
        condition = {"IfNoneMatch": "*"} if if_none_match else {}
        parts = sorted(self.parts, key=lambda part: int(part["PartNumber"]))
        self.run(
            lambda: self.client.complete_multipart_upload(
                **self.target, UploadId=self.upload_id, MultipartUpload={"Parts": parts}, **condition
            )
        )

    def abort(self) -> None:
        """Free the parts; an upload that is gone already is passed over."""
        try:
            self.run(lambda: self.client.abort_multipart_upload(**self.target, UploadId=self.upload_id))
        except ObjectNotFoundError:
            return


def upload_in_parts(upload: MultipartUpload, source: bytes | Path, size: int, part_bytes: int) -> None:
    """Send all parts, some at a time, each with its SHA256, which the server compares."""

    def send(number: int, offset: int, length: int) -> dict[str, Any]:
        body = _read_part(source, offset, length)
        checksum = base64.b64encode(hashlib.sha256(body).digest()).decode()
        reply = upload.run(
            lambda: upload.client.upload_part(
                **upload.target, UploadId=upload.upload_id, PartNumber=number, Body=body, ChecksumSHA256=checksum
            )
        )
        return {"PartNumber": number, "ETag": reply["ETag"], "ChecksumSHA256": checksum}

    upload.parts = _in_parallel(send, size, part_bytes)


def copy_in_parts(upload: MultipartUpload, origin: dict[str, Any], size: int, part_bytes: int) -> None:
    """Let the server copy all parts of `origin` (CopySource and its condition)."""

    def copy(number: int, offset: int, length: int) -> dict[str, Any]:
        reply = upload.run(
            lambda: upload.client.upload_part_copy(
                **upload.target,
                **origin,
                UploadId=upload.upload_id,
                PartNumber=number,
                CopySourceRange=f"bytes={offset}-{offset + length - 1}",
            )
        )
        return {"PartNumber": number, "ETag": reply["CopyPartResult"]["ETag"]}

    upload.parts = _in_parallel(copy, size, part_bytes)


def _read_part(source: bytes | Path, offset: int, length: int) -> bytes:
    if isinstance(source, bytes):
        return source[offset : offset + length]
    with os_errors_as_storage_errors(f"source {source}"), source.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _in_parallel(work: Callable[[int, int, int], dict[str, Any]], size: int, part_bytes: int) -> list[dict[str, Any]]:
    """Run `work(number, offset, length)` for each part; the first failure ends the rest."""
    length = max(part_bytes, math.ceil(size / _MAX_PARTS))
    offsets = range(0, size, length)
    with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="part") as pool:
        futures = [pool.submit(work, i + 1, o, min(length, size - o)) for i, o in enumerate(offsets)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
