"""An iterator that works ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterator[Item], depth: int = 2) -> Generator[Item, None, None]:
    """Run `items` in a thread, `depth` ahead.

    An exception of `items` is raised where its next item would have come. Closing the generator ends the thread.
    """
    box: queue.Queue[tuple[bool, Any]] = queue.Queue(maxsize=depth)
    closed = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, box, closed), name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            alive, value = box.get()
            if alive:
                yield value
            elif value is None:
                return
            else:
                raise value
    finally:
        closed.set()
        thread.join()


def _fill(items: Iterator[Any], box: queue.Queue[tuple[bool, Any]], closed: threading.Event) -> None:
    try:
        for item in items:
            if not _put(box, closed, (True, item)):
                return
        _put(box, closed, (False, None))
    except BaseException as error:  # noqa: BLE001 (handed to the consumer, who raises it)
        _put(box, closed, (False, error))


def _put(box: queue.Queue[tuple[bool, Any]], closed: threading.Event, entry: tuple[bool, Any]) -> bool:
    """Put an entry unless the consumer has gone; a plain `put` would wait for it forever."""
    while not closed.is_set():
        try:
            box.put(entry, timeout=0.05)
        except queue.Full:
            continue
        return True
    return False
