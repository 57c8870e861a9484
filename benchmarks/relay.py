"""A relay before a server that counts bytes both ways, HTTP included: whatever client speaks, it is measured alike.

It runs in a process of its own and moves bytes inside the kernel, so that it costs the measured process nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

PIPE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Relay:
    """A running relay: its port on this machine, and bytes to and from the server so far."""

    port: int
    sent: Any
    received: Any

    def counts(self) -> tuple[int, int]:
        """Bytes that clients sent, and that they received."""
        return int(self.sent.value), int(self.received.value)


@contextmanager
def counting_relay(server_port: int) -> Iterator[Relay]:
    """Relay to a server on this machine until the context ends."""
    context = multiprocessing.get_context("spawn")
    counters = context.Value("q", 0), context.Value("q", 0)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        process = context.Process(target=_serve, args=(listener, server_port, *counters), daemon=True)
        process.start()
        try:
            yield Relay(listener.getsockname()[1], *counters)
        finally:
            process.terminate()
            process.join()


def _serve(listener: socket.socket, server_port: int, sent: Any, received: Any) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", server_port))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((client, server, sent), (server, client, received)):
            threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, counter: Any) -> None:
    """Move bytes one way; each is counted before it goes on, so that no reader of the counter is early."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with contextlib.suppress(OSError):  # an end hung up
        while count := os.splice(source.fileno(), into, PIPE_BYTES):
            with counter.get_lock():
                counter.value += count
            while count:
                count -= os.splice(out, target.fileno(), count)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    os.close(out)
    os.close(into)
