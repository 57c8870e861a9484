"""A real HTTP server that answers chat completions at once, or as a plan of faults says.

Run it in a thread (`serving`), or as a process of its own for measurements: `python stub_server.py --port 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FAULTS = {"reset": 0.05, "busy": 0.02, "hang": 0.01, "truncated": 0.01, "empty": 0.005}
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def answer(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A reply as vLLM gives it; the text repeats the question."""
    question = request["messages"][-1]["content"]
    choice = {"message": {"role": "assistant", "content": f"You said: {question}"}, "finish_reason": "stop"}
    ids = {"token_ids": [*range(1000, 1010), 2]}
    return {
        "id": "chatcmpl-1",
        "model": request["model"],
        "prompt_token_ids": [1, 5, 9],
        "choices": [{"index": 0, **choice, **ids, **changes}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 11, "total_tokens": 14},
    }


@dataclass(slots=True)
class Stub:
    """What the server does and what it saw.

    Attributes:
        faults: share of the requests that meet each fault.
        answer: makes the reply of the others.
        slots: requests worked on at a time; 0 answers at once.
        service_s: what one request takes in its slot.
        seen: requests by the last message's text.
    """

    faults: dict[str, float] = field(default_factory=dict)
    answer: Answer = answer
    slots: int = 0
    service_s: float = 0.0
    seed: int = 1
    status: int = 200
    seen: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    faulted: Counter[str] = field(default_factory=Counter)
    url: str = ""
    max_active: int = 0
    keep_bodies: bool = True
    _active: int = 0
    _random: random.Random = field(default_factory=random.Random)
    _slots: asyncio.Semaphore | None = None

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    async def handle(self, head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if head.startswith(b"GET"):
            _reply(transport, 200, {"data": [{"id": "stub"}]})
            return
        request = json.loads(body)
        if self.keep_bodies:
            self.headers.append(head)
            self.bodies.append(request)
            self.seen[request["messages"][-1]["content"] if "messages" in request else "ids"] += 1
        self._active += 1
        self.max_active = max(self.max_active, self._active)
        try:
            await self._serve(request, transport)
        finally:
            self._active -= 1

    async def _serve(self, request: dict[str, Any], transport: asyncio.Transport) -> None:
        if self.slots:
            self._slots = self._slots or asyncio.Semaphore(self.slots)
            async with self._slots:
                await asyncio.sleep(self.service_s)
        if self.status != 200:
            _reply(transport, self.status, {"error": {"message": "refused by the test"}})
            return
        fault = self._draw()
        self.faulted[fault] += bool(fault)
        if fault == "reset":
            transport.abort()
        elif fault == "busy":
            _reply(transport, 429, {"error": "busy"}, b"retry-after: 0.05\r\n")
        elif fault == "hang":
            return
        elif fault == "truncated":
            _reply(transport, 200, json.dumps(self.answer(request)).encode()[:-40])
        elif fault == "empty":
            reply = self.answer(request)
            reply["choices"][0]["message"]["content"] = ""
            _reply(transport, 200, reply)
        else:
            _reply(transport, 200, self.answer(request))

    def _draw(self) -> str:
        place = self._random.random()
        for name, share in self.faults.items():
            if place < share:
                return name
            place -= share
        return ""


def _reply(transport: asyncio.Transport, status: int, content: Any, header: bytes = b"") -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))
    if not transport.is_closing():
        transport.write(head + header + b"\r\n" + body)


class _Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            found = _LENGTH.search(head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            body, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
            task = asyncio.get_running_loop().create_task(self._stub.handle(head, body, self._transport))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """Serve in a thread; `stub.url` is the base URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: _Connection(stub), "127.0.0.1", 0))
    # Client and server share the interpreter lock: with the default of 5 ms each request would wait that long for it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = server.sockets[0].getsockname()[1]
    stub.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        sys.setswitchinterval(interval)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def unused_url() -> str:
    """A base URL at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


async def _serve_forever(stub: Stub) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(stub), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--service-s", type=float, default=0.0)
    chosen = parser.parse_args()
    asyncio.run(
        _serve_forever(
            Stub(FAULTS if chosen.faulty else {}, slots=chosen.slots, service_s=chosen.service_s, keep_bodies=False)
        )
    )
