"""An HTTP proxy before the real S3 server that damages, cuts, loses or delays chosen messages."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from dflash.storage import S3Credentials

Kind = Literal["cut", "flip_down", "flip_up", "lose_reply", "unavailable", "empty_page", "error_200", "stall", "reset"]


@dataclass(slots=True)
class Fault:
    """One fault, for the next `times` requests that match.

    Attributes:
        kind: `cut` halves the body under a matching Content-Length; `flip_down` and `flip_up` change one bit of the
            reply or of the request's body; `lose_reply` closes after the server did it; `unavailable` answers 503;
            `empty_page` answers a listing with no keys; `error_200` an error under
            status 200; `stall` is silent for 30 s; `reset` closes in the middle.
        pattern: regular expression over `METHOD path?query`.
        times: how often.
    """

    kind: Kind
    pattern: str
    times: int = 1


@dataclass(slots=True)
class Proxy:
    """A running proxy: where it listens, its faults, all requests that it saw, and whether replies tell digests."""

    credentials: S3Credentials
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    tells_digests: bool = True

    def take(self, request: str) -> Kind | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault.kind
        return None


@contextmanager
def run_proxy(upstream: S3Credentials) -> Iterator[Proxy]:
    """Run a proxy before an S3 server; its `credentials` lead through it."""
    host = urlsplit(upstream.endpoint_url or "")
    closing = threading.Event()

    class Handler(_Handler):
        upstream_host = (host.hostname or "", host.port or 80)
        stop = closing

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    Handler.proxy = Proxy(upstream.model_copy(update={"endpoint_url": endpoint}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Handler.proxy
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    upstream_host: tuple[str, int]
    stop: threading.Event

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test output clean."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.proxy.take(f"{self.command} {self.path}")
        if kind == "unavailable":
            self.answer(503, {}, b"")
            return
        if kind == "flip_up":
            body = _flip(body)
        upstream = http.client.HTTPConnection(*self.upstream_host, timeout=60)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        reply = upstream.getresponse()
        data = reply.read()
        headers = {k: v for k, v in reply.getheaders() if k.lower() not in {"transfer-encoding", "connection"}}
        if not self.proxy.tells_digests:
            headers = {k: v for k, v in headers.items() if not k.lower().startswith("x-amz-checksum")}
        upstream.close()
        self.damage(kind, reply.status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def damage(self, kind: Kind | None, status: int, headers: dict[str, str], data: bytes) -> None:
        if kind == "lose_reply":
            self.close_connection = True
            return
        if kind == "stall":
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not self.stop.is_set():
                time.sleep(0.05)
            self.close_connection = True
            return
        if kind == "cut":
            data = data[: len(data) // 2]
        if kind == "flip_down":
            data = _flip(data)
        if kind == "empty_page":
            page = "<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
            data = f'<?xml version="1.0"?><ListBucketResult>{page}</ListBucketResult>'.encode()
        if kind == "error_200":
            data = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>try again</Message></Error>'
        self.answer(status, headers, data, is_reset=kind == "reset")

    def answer(self, status: int, headers: dict[str, str], data: bytes, *, is_reset: bool = False) -> None:
        self.send_response(status)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        for name, value in headers.items():
            if name.lower() not in {"content-length", "date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_reset else data)
        if is_reset:
            self.close_connection = True


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
