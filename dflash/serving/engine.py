"""The thread that owns the model: it takes what waits, decodes it together, and answers.

Requests that arrive while a batch is decoded wait for its end. With a drafter, a request that is alone is decoded
speculatively; several at once go through the target as a batch, which is quicker for all of them.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from dflash.errors import ServiceError
from dflash.eval.speculate import DecodeOptions, Speculator
from dflash.serving.decoding import Decoding, decode_batch

GATHER_S = 0.01  # how long a request waits for others that come at the same time


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one request got.

    Attributes:
        ids: new ids, an end id included.
        seconds: of the batch that it was in.
        accepted: accepted drafts of each round; None without a drafter.
    """

    ids: list[int]
    seconds: float
    accepted: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    decoding: Decoding
    future: Future[Decoded] = field(default_factory=Future)


class Engine:
    """Decodes in a thread of its own; used as a context.

    Args:
        model: a causal language model.
        end_ids: end a sequence.
        speculator: for requests that are alone.
        max_batch: most prompts at a time.
        max_waiting: more than these are refused.
    """

    def __init__(
        self,
        model: Any,
        end_ids: Collection[int],
        speculator: Speculator | None = None,
        max_batch: int = 64,
        max_waiting: int = 4096,
    ) -> None:
        self._model = model
        self._end_ids = end_ids
        self._speculator = speculator
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="decoder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """See `stop`; returns when the thread has ended."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """End before the next pass of the target; what waits and what is in work is refused."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def submit(self, decoding: Decoding) -> Future[Decoded] | None:
        """Queue a request; None where too many wait already."""
        entry = _Waiting(decoding)
        with self._changed:
            if self._is_stopping or len(self._waiting) >= self._max_waiting:
                return None
            self._waiting.append(entry)
            self._changed.notify()
        return entry.future

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            started = time.perf_counter()
            try:
                answers = self._decode([entry.decoding for entry in batch])
            except Exception as error:  # noqa: BLE001 (the answer to these requests; the next ones may be decoded)
                for entry in batch:
                    entry.future.set_exception(error)
                continue
            if self._is_stopping:  # what there is may be cut: nobody could tell
                self._refuse(batch)
                break
            seconds = time.perf_counter() - started
            for entry, (ids, accepted) in zip(batch, answers, strict=True):
                entry.future.set_result(Decoded(ids, seconds, accepted))
        self._refuse([entry for entry in self._waiting if entry.future.set_running_or_notify_cancel()])

    @staticmethod
    def _refuse(entries: Sequence[_Waiting]) -> None:
        for entry in entries:
            entry.future.set_exception(ServiceError("the server is stopping; ask another one"))

    def _take(self) -> list[_Waiting] | None:
        """The next batch; None when the engine stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            if not self._is_stopping and len(self._waiting) < self._max_batch:
                self._changed.wait_for(lambda: self._is_stopping, timeout=GATHER_S)
            if self._is_stopping:
                return None
            count = min(self._max_batch, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(count)]
        return [entry for entry in taken if entry.future.set_running_or_notify_cancel()]

    def _decode(self, decodings: Sequence[Decoding]) -> list[tuple[list[int], list[int] | None]]:
        if not decodings:
            return []
        if self._speculator is not None and len(decodings) == 1 and decodings[0].top_k is None:
            one = decodings[0]
            options = DecodeOptions(
                one.max_tokens, self._end_ids, one.sampling, lambda: self._is_stopping or one.given_up.is_set()
            )
            decoded = self._speculator.decode(one.prompt_ids, options)
            return [(decoded.ids, decoded.accepted)]
        return [(ids, None) for ids in decode_batch(self._model, decodings, self._end_ids, self._has_to_stop)]

    def _has_to_stop(self) -> bool:
        return self._is_stopping
