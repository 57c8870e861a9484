"""Signals that ask a run to save and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal(*signals: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Turn signals (SIGTERM where none is named) into an answer for `Hooks.should_stop`.

    The old handlers come back at the end. A second Ctrl-C doesn't wait for anything. Only the main thread may use it:
    Python delivers signals there.
    """
    asked = threading.Event()

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, note) for number in signals or (signal.SIGTERM,)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
