"""Short messages between target ranks and drafter ranks, and the news that one of them is gone.

Messages travel over a gloo group of their own and tensors over the ranks' usual group (NCCL on GPUs). One thread for
each other rank waits for its messages, so that a rank always has a receive posted: sending never waits for what the
other rank is computing, and when a process dies its connection closes and all others hear it at once, whatever they
wait for. A kernel of NCCL that waits for a dead rank would not hear it; so it is only launched for a tensor that was
announced.

Each rank ends with a `bye` to all it talks to, which also carries why it failed; the threads end with it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.errors import PeerLostError, TrainingError

_MESSAGE_BYTES = 1024
_MESSAGE_TAG, _TENSOR_TAG = 71, 72
_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank said.

    Attributes:
        sender: its rank.
        kind: what it is about.
        fields: the rest.
    """

    sender: int
    kind: str
    fields: dict[str, Any]


class Peers:
    """This rank's connections to those on the other side.

    Args:
        others: ranks of the other side.
        group: gloo, over all ranks; its own timeout must be longer than any run.
        timeout_s: silence after which the run ends.
    """

    def __init__(self, others: Sequence[int], group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        # NCCL's waits only order streams; with a limit they would hold up this thread until the tensor is there.
        self._tensor_limit = self._limit if dist.get_backend() == "gloo" else None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._goodbyes: list[dist.Work] = []
        self._threads = {
            rank: threading.Thread(target=self._listen, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in others
        }
        for thread in self._threads.values():
            thread.start()

    def send(self, rank: int, kind: str, **fields: Any) -> None:
        """Say something to a rank; at most a few hundred bytes.

        Raises:
            PeerLostError: it is gone, or hangs: then it has taken nothing for too long.
        """
        work = self._begin(rank, kind, fields)
        with self._losing(rank):
            work.wait(self._limit)

    def get(self, waiting_for: str) -> Message:
        """Return the next message of any rank, `bye` included.

        Args:
            waiting_for: what this rank needs, for the message of an error.

        Raises:
            PeerLostError: a rank is gone, or none says anything for too long.
        """
        try:
            message = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerLostError(
                f"No word of ranks {sorted(self._threads)} for {self._timeout_s:.0f} s while waiting for "
                f"{waiting_for}. Look at their lines in the log; the same run, started again, goes on from the newest "
                "checkpoint."
            ) from None
        if message.kind == "lost":
            raise _lost(message.sender, message.fields["error"])
        return message

    def send_tensor(self, rank: int, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor that was announced; it must stay as it is until the returned work has been waited for.

        Raises:
            PeerLostError: the rank is gone.
        """
        with self._losing(rank):
            work = dist.isend(tensor, rank, tag=_TENSOR_TAG)
        assert work is not None
        return work

    def receive_tensor(self, rank: int, tensor: Tensor) -> None:
        """Fill a tensor with the next one that the rank sends.

        Raises:
            PeerLostError: the rank is gone, or hangs.
        """
        with self._losing(rank):
            work = dist.irecv(tensor, rank, tag=_TENSOR_TAG)
        assert work is not None
        self.finish(rank, [work])

    def finish(self, rank: int, works: Sequence[dist.Work]) -> None:
        """Wait until tensors are sent, or received.

        Raises:
            PeerLostError: the rank is gone, or hangs.
        """
        with self._losing(rank):
            for work in works:
                if self._tensor_limit is None:
                    work.wait()
                else:
                    work.wait(self._tensor_limit)

    def say_bye(self, failed: BaseException | None = None) -> None:
        """Say goodbye to all, and why if it is early; never raises, and never waits for a rank that hangs."""
        why = None if failed is None else _short(f"{type(failed).__name__}: {failed}")
        for rank in self._threads:
            with contextlib.suppress(PeerLostError):
                self._goodbyes.append(self._begin(rank, "bye", {"failed": why}))

    def close(self) -> None:
        """Wait for the others' goodbyes."""
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, rank: int, kind: str, fields: dict[str, Any]) -> dist.Work:
        data = json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode()
        assert len(data) <= _MESSAGE_BYTES, len(data)
        box = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        box[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._losing(rank):
            work = dist.isend(box, rank, group=self._group, tag=_MESSAGE_TAG)
        assert work is not None
        return work

    def _listen(self, rank: int) -> None:
        box = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        kind = ""
        while kind not in {"bye", "lost"}:
            try:
                dist.recv(box, rank, group=self._group, tag=_MESSAGE_TAG)
                fields = json.loads(bytes(box.tolist()).rstrip(b"\0"))
                kind = fields.pop("kind")
            except Exception as error:  # noqa: BLE001 (handed to the thread that waits for messages)
                kind, fields = "lost", {"error": str(error)}
            self._inbox.put(Message(rank, kind, fields))

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks of the other side."""
        return tuple(self._threads)

    @contextlib.contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        """Turn an error of the connection into one that says which rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise _lost(rank, str(error)) from error


def _short(text: str) -> str:
    """Bound a text to what fits a message whatever it holds: four bytes a character at the most."""
    return "".join(letter if letter.isprintable() else " " for letter in text[: _MESSAGE_BYTES // 5])


def ended(message: Message) -> TrainingError:
    """The error of a rank whose partner said goodbye too early."""
    failed = message.fields.get("failed")
    return PeerLostError(
        f"Rank {message.sender} ended while this one still needed it: {failed or 'it had nothing more to do'}. The "
        "same run, started again, goes on from the newest checkpoint."
    )


def _lost(rank: int, error: str) -> PeerLostError:
    return PeerLostError(
        f"Rank {rank} is gone: {error.splitlines()[0][:200] if error else 'its connection closed'}. Look at its own "
        "lines in the log, and for an out-of-memory kill in the kernel's; the same run, started again, goes on from "
        "the newest checkpoint."
    )
