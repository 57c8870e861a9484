"""One try against a server that says strange things: what it is taken for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import pytest

import dflash.generate.client as client_module
from dflash.errors import ServiceError
from dflash.generate.answers import Failure
from dflash.generate.client import Client, find_model, open_session
from dflash.generate.config import GenerateRun
from dflash.generate.prompts import Prompt
from dflash.generate.requests import OpenAIDialect, make_request
from tests.generate.stub_server import Stub, serving, unused_url

ONCE = ("refused", "too_long", "redirected", "unauthorised", "not_found", "other_model")
RUN = GenerateRun(prompts="p", batch="b", endpoints=("http://a/v1",))
REQUEST = make_request(Prompt("q", [{"role": "user", "content": "Why?"}]), RUN, "m")


@dataclass(slots=True)
class Raw(Stub):
    """Sends these bytes, whatever is asked."""

    data: bytes = b""
    close: bool = False

    async def handle(self, head: bytes, body: bytes, transport: asyncio.Transport) -> None:  # noqa: ARG002
        transport.write(self.data)
        if self.close:
            transport.close()


def http(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def ask(url: str, timeout_s: float = 10) -> Any:
    async def work() -> Any:
        async with open_session(None, 4) as session:
            return await Client(session, OpenAIDialect(), timeout_s).ask(url, REQUEST, 1)

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (http(200, b""), "broken_json"),
        (http(200, b'{"choices": [{"mess'), "broken_json"),
        (http(200, b'{"choices": [], "choices": []}'), "broken_json"),
        (http(200, b'{"usage": {"completion_tokens": NaN}}'), "broken_json"),
        (http(200, b"[]"), "bad_reply"),
        (http(200, b'{"error": "no"}'), "bad_reply"),
        (http(200, b'{"choices": [{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}]}'), "broken_json"),
        (http(201, b"{}"), "redirected"),
        (http(302, b"", "location: http://127.0.0.1:1/\r\n"), "redirected"),
        (http(400, b"bad tools"), "refused"),
        (http(400, b"This model's maximum context length is 4096 tokens"), "too_long"),
        (http(400, b'{"error": {"code": "context_length_exceeded"}}'), "too_long"),
        (http(413, b""), "too_long"),
        (http(200, b"<html>log in</html>", "content-type: text/html\r\n"), "broken_json"),
        (http(200, b'{"choices": "none", "usage": 5}'), "bad_reply"),
        (
            http(200, b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": [1]}'),
            "bad_reply",
        ),
        (
            http(200, b'{"model": "x", "choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}'),
            "other_model",
        ),
        (http(422, b""), "refused"),
        (http(401, b""), "unauthorised"),
        (http(404, b""), "not_found"),
        (http(408, b""), "timeout"),
        (http(429, b"", "retry-after: 3\r\n"), "too_many_requests"),
        (http(500, b""), "server_error"),
        (http(502, b"<html>"), "server_error"),
        (http(503, b""), "overloaded"),
        (http(504, b""), "timeout"),
        (b"this is no HTTP\r\n\r\n", "broken_connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "broken_connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "broken_connection"),
    ],
)
def test_strange_replies(data: bytes, kind: str) -> None:
    with serving(Raw(data=data, close=True)) as stub:
        failure = ask(stub.url)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert failure.may_retry == (kind not in ONCE)
    assert failure.other_seed == (b"ud83d" in data), "what was sampled is sampled again otherwise"
    assert failure.retry_after_s == (3 if kind == "too_many_requests" else 0)


def test_a_body_without_end_and_one_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLY_BYTES", 1000)
    with serving(Raw(data=http(200, b"x" * 2000))) as stub:
        assert ask(stub.url).kind == "too_large"
    with serving(Raw(data=b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")) as stub:
        failure = ask(stub.url, timeout_s=0.3)
    assert (failure.kind, failure.is_pressure, failure.is_fault) == ("timeout", True, True)


def test_nobody_listens() -> None:
    failure = ask(unused_url())
    assert (failure.kind, failure.is_fault, failure.is_pressure) == ("no_connection", True, False)


def test_a_server_that_never_accepts_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as waiting:
        for _ in range(3):  # they fill the backlog
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        failure = ask(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
    assert (failure.kind, failure.message) == ("no_connection", "no connection within 0.3 s")


def test_what_a_server_says_steers_no_terminal() -> None:
    with serving(Raw(data=http(401, b"\x1b[2J\nno"))) as stub:
        assert ask(stub.url).message == "status 401: \\x1b[2J\\nno"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("2", 2), ("-5", 0), ("1e9", 300), ("nan", 0), ("soon", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert client_module._seconds(header) == seconds


def test_the_model_is_asked_for() -> None:
    async def find(url: str) -> str:
        async with open_session(None, 1) as session:
            return await find_model(session, (unused_url(), url))

    with serving(Stub()) as stub:
        assert asyncio.run(find(stub.url)) == "stub"
    with serving(Raw(data=http(200, b'{"data": [{"id": "a"}, {"id": "b"}]}'))) as stub:
        url = stub.url
        with pytest.raises(ServiceError, match="serves a, b"):
            asyncio.run(find(url))


def test_endpoints_that_serve_different_models_are_refused() -> None:
    async def find(*urls: str) -> str:
        async with open_session(None, 1) as session:
            return await find_model(session, urls)

    one, other = (Raw(data=http(200, b'{"data": [{"id": "%s"}]}' % name)) for name in (b"stub", b"larger"))
    with serving(Stub()) as first, serving(one) as second, serving(other) as third:
        assert asyncio.run(find(first.url, second.url)) == "stub"
        with pytest.raises(ServiceError, match=r"(?s)serves stub.*serves larger"):
            asyncio.run(find(first.url, third.url))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (http(401, b'{"error": "no key"}'), 'status 401: {"error": "no key"}'),
        (http(200, b"<html>log in</html>"), "status 200: <html>log in</html>"),
        (http(200, b"[" * 100_000), "status 200: \\[\\["),
        (http(200, b'{"data": [{"id": "\\ud800"}]}'), "status 200"),
        (http(200, b'{"data": 5}'), "status 200"),
    ],
)
def test_what_is_no_list_of_models_is_shown(data: bytes, found: str) -> None:
    async def find(url: str) -> str:
        async with open_session(None, 1) as session:
            return await find_model(session, (url,))

    with serving(Raw(data=data)) as stub:
        url = stub.url
        with pytest.raises(ServiceError, match=found):
            asyncio.run(find(url))
