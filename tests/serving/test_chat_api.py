"""What the HTTP surface says when something is wrong: always an error object of OpenAI's API, and soon."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from dflash.data.tokenizer import load_tokenizer
from dflash.model.target_loading import load_model
from dflash.serving.chat_api import ChatServer
from dflash.serving.decoding import Decoding
from dflash.serving.engine import Engine

END = frozenset({2})
CONTEXT = 512
QUESTION = [{"role": "user", "content": "Why?"}]
COMPLETE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tiny_target: Path) -> Iterator[ChatServer]:
    model = load_model(str(tiny_target), torch.float32, trust_remote_code=False).eval()
    with Engine(model, END) as engine:
        yield ChatServer(engine, load_tokenizer(tiny_target), "tiny", CONTEXT, END)


@pytest.fixture(scope="module")
def client(server: ChatServer) -> Iterator[TestClient]:
    with TestClient(server.app(), raise_server_exceptions=False) as client:
        yield client


def error_of(reply: Any, status: int) -> dict[str, Any]:
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    found: dict[str, Any] = reply.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


def test_a_failing_engine_gives_an_error_object_and_the_next_request_an_answer(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("dflash.serving.engine.decode_batch", lambda *_: 1 // 0)
        found = error_of(client.post(COMPLETE, json={"messages": QUESTION, "max_tokens": 2}), 500)
    assert found["type"] == "server_error"
    assert found["message"] == "decoding failed: ZeroDivisionError: integer division or modulo by zero"
    assert client.post(COMPLETE, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200


def test_a_failure_that_nobody_expects_gives_an_error_object(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.serving.chat_api.prompt_token_ids", lambda *_: 1 // 0)
    with TestClient(server.app(), raise_server_exceptions=False) as client:
        found = error_of(client.post(COMPLETE, json={"messages": QUESTION}), 500)
    assert found["message"].startswith("the server failed: ZeroDivisionError")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2/models", 404), ("GET", COMPLETE, 405), ("POST", "/v1/completions", 404)]
)
def test_what_is_not_served_is_named(client: TestClient, method: str, path: str, status: int) -> None:
    assert error_of(client.request(method, path), status)["message"] == f"{method} {path} is not served"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("word " * CONTEXT, r"the prompt has 5\d\d and 1 are asked for"),
        ("word " * 100_000, "the prompt has at least "),
        ("a" * 20_000_000, "the prompt has at least "),
        ("\u0301" * 2_000_000, "the prompt has at least "),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_as_what_it_is(client: TestClient, content: str, found: str) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}, *QUESTION]
    started = time.process_time()
    error = error_of(client.post(COMPLETE, json={"messages": messages}), 400)
    assert time.process_time() - started < 3, "encoding 20 MB takes longer"
    assert error["code"] == "context_length_exceeded"
    assert re.match(f"This model's maximum context length is {CONTEXT} tokens; {found}", error["message"])


def test_more_than_the_context_has_room_for_is_refused(client: TestClient) -> None:
    error = error_of(client.post(COMPLETE, json={"messages": QUESTION, "max_tokens": CONTEXT}), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"and {CONTEXT} are asked for" in error["message"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "Invalid JSON"),
        (b"[]", "should be an object"),
        (b'{"messages": []}', "messages: List should have at least 1 item"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "Invalid JSON"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', "unknown_role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature: "),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": true}', "stream: "),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}', "response_f"),
        (b'{"messages": [{"role": "user", "content": "x"}], "presence_penalty": 0.5}', "presence_penalty: "),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}',
            "chat_template_kwargs: messages can't be passed",
        ),
    ],
)
def test_bad_requests_are_refused_by_name(client: TestClient, body: bytes, found: str) -> None:
    assert found in error_of(client.post(COMPLETE, content=body), 400)["message"]


@pytest.mark.parametrize("sent", [b"{", json.dumps({"messages": QUESTION, "max_tokens": 400}).encode()])
def test_a_client_that_goes_away_is_no_failure_and_holds_nobody_up(server: ChatServer, sent: bytes) -> None:
    is_whole = len(sent) > 1
    coming = [{"type": "http.request", "body": sent, "more_body": not is_whole}, {"type": "http.disconnect"}]
    statuses: list[int] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "method": "POST", "path": COMPLETE, "headers": [], "query_string": b""}
    asyncio.run(server.app()(scope, receive, send))
    assert (statuses, coming) == ([499], [])
    following = server.engine.submit(Decoding([5], 1))
    assert following is not None
    assert len(following.result(60).ids) == 1


def test_a_body_beyond_the_limit_is_refused_when_it_has_come(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.serving.chat_api.MAX_BODY_BYTES", 1 << 20)
    body = json.dumps({"messages": [{"role": "user", "content": "a" * (3 << 20)}]})
    assert error_of(client.post(COMPLETE, content=body), 413)["message"] == (
        "the request has 3 MiB; expected at most 1 MiB"
    )


def test_zero_penalties_change_nothing_and_are_taken(client: TestClient) -> None:
    asked = {"messages": QUESTION, "max_tokens": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0}
    assert client.post(COMPLETE, json=asked).status_code == 200
