"""Loads a target, maybe with a drafter, and serves it until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from dflash.data.tokenizer import TargetTokenizer, load_tokenizer
from dflash.errors import ServiceError
from dflash.eval.job import require_same_target
from dflash.eval.speculate import Speculator
from dflash.eval.subject import open_subject
from dflash.model.device import choose_device
from dflash.model.features import Target
from dflash.model.target_loading import load_model
from dflash.serving.chat_api import ChatServer
from dflash.serving.engine import Engine
from dflash.storage import S3Credentials

DEFAULT_CONTEXT = 4096  # where the target's configuration names none
GRACE_S = 5.0  # what requests in work have to end when the server is told to stop
CLOSE_S = 2  # until clients that neither ask nor read are left alone


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is served, and where.

    Attributes:
        target: folder or id.
        drafter: checkpoint, run or export; None for the target alone.
        name: the model's name; None takes the last part of `target`.
        host: address; the loopback interface unless told otherwise.
        port: 0 takes a free one.
        max_batch: most prompts decoded at a time.
        device: `cpu`, `cuda` or `auto`.
    """

    target: str
    drafter: str | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    max_batch: int = 64
    device: str = "cpu"


def serve(options: ServeOptions, credentials: S3Credentials | None, cache: Path, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then requests in work have five seconds, and what is left is refused.

    Args:
        options: what and where.
        credentials: for a drafter on S3.
        cache: folder of checked copies.
        ready: told the base URL as soon as requests are taken.

    Raises:
        ServiceError: the address can't be had.
        UsageError: there is no such device here.
    """
    device = choose_device(options.device)
    listening = _listen(options.host, options.port)
    with listening:
        tokenizer = load_tokenizer(options.target)
        model, speculator = _load(options, device, credentials, cache)
        ends = end_ids(model, tokenizer)
        with Engine(model, ends, speculator, options.max_batch) as engine:
            limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
            name = options.name or Path(options.target).name
            app = ChatServer(engine, tokenizer, name, int(limit), ends).app()
            host, port = listening.getsockname()[:2]
            server = _Server(app, lambda: ready(f"http://{host}:{port}/v1"), engine.stop)
            with _stop_is_no_failure():
                server.run(sockets=[listening])


def end_ids(model: Any, tokenizer: TargetTokenizer) -> Collection[int]:
    """Ids that end a turn: those of the configuration, the generation settings and the tokenizer."""
    found = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for place in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        value = getattr(place, "eos_token_id", None)
        found |= set(value) if isinstance(value, list | tuple) else set() if value is None else {value}
    return frozenset(found)


@contextmanager
def _stop_is_no_failure() -> Iterator[None]:
    """Uvicorn ends in order on a signal and then raises it again, which would end the process as killed."""
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """Tells when it is ready, and stops the engine when requests in work have had their time."""

    def __init__(self, app: Starlette, ready: Callable[[], None], stop: Callable[[], None]) -> None:
        limit = int(GRACE_S) + CLOSE_S
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=limit))
        self._ready = ready
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; what the engine refuses is answered before connections are cut."""
        asyncio.get_running_loop().call_later(GRACE_S, self._stop)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    if not host:
        raise ServiceError("'' can't be listened at: it stands for every address. Choose another --host or --port.")
    try:
        return socket.create_server((host, port), backlog=1024)
    except (OSError, ValueError) as error:  # the latter for names that no resolver takes
        raise ServiceError(
            f"{host!r}:{port} can't be listened at: {error}. Choose another --host or --port."
        ) from error


def _load(
    options: ServeOptions, device: torch.device, credentials: S3Credentials | None, cache: Path
) -> tuple[Any, Speculator | None]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.drafter is None:
        return load_model(options.target, dtype, trust_remote_code=False).to(device).eval(), None
    subject = open_subject(options.drafter, credentials, cache)
    target = Target.load(options.target, subject.config.target_layer_ids, device, dtype)
    require_same_target(subject, target, options.target)
    return target.model, Speculator(target, subject.load(dtype).to(device))
