"""Servers that only pretend to write on condition are found out before anything is published there."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from dflash.errors import ConditionalWriteError, StorageError
from dflash.storage import S3Credentials, TransferLimits, open_store


class CarelessHandler(BaseHTTPRequestHandler):
    """An object server that forgets chosen condition headers."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    ignored: frozenset[str]
    has_etags = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test output clean."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        old = self.objects.get(self.path)
        obeyed = {name: self.headers[name] for name in ("If-None-Match", "If-Match") if name not in self.ignored}
        is_taken = obeyed.get("If-None-Match") is not None and old is not None
        is_other = obeyed.get("If-Match") not in {None, etag(old)}
        if is_taken or is_other:
            self.answer(412)
        else:
            self.objects[self.path] = body
            self.answer(200, etag(body) if self.has_etags else None)

    def do_POST(self) -> None:
        keys = re.findall("<Key>(.*?)</Key>", self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        for key in keys:
            self.objects.pop(f"{self.path.split('?')[0]}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, body=f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def answer(self, status: int, tag: str | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        if tag is not None:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def etag(data: bytes | None) -> str:
    return f'"{hashlib.md5(data or b"", usedforsecurity=False).hexdigest()}"'


@contextmanager
def careless_server(*ignored: str, has_etags: bool = True) -> Iterator[S3Credentials]:
    fields = {"objects": {}, "ignored": frozenset(ignored), "has_etags": has_etags}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (CarelessHandler,), fields))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield S3Credentials(
            endpoint_url=f"http://127.0.0.1:{server.server_address[1]}",
            access_key_id="a",
            secret_access_key=SecretStr("b"),
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_refused(ignored: str) -> None:
    with (
        careless_server(ignored) as credentials,
        pytest.raises(ConditionalWriteError, match=f"does not enforce {ignored}"),
    ):
        open_store("s3://bucket/root", credentials, TransferLimits(attempts=1)).probe_conditional_writes()


def test_a_server_without_etags_is_refused() -> None:
    with careless_server(has_etags=False) as credentials, pytest.raises(StorageError, match="ETag"):
        open_store("s3://bucket/root", credentials, TransferLimits(attempts=1)).probe_conditional_writes()


def test_the_careful_twin_of_that_server_is_accepted() -> None:
    with careless_server() as credentials:
        open_store("s3://bucket/root", credentials, TransferLimits(attempts=1)).probe_conditional_writes()
