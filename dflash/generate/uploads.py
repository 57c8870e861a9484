"""Brings finished records from the spool to the batch, beside the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from dflash.generate.parts import BatchLog
from dflash.generate.spool import Spool

PARTS_AHEAD: Final = 4  # full files that may wait for the store before requests wait too


class Uploads:
    """A queue of full spool files and the task that makes them parts; for use in one event loop."""

    def __init__(self, log: BatchLog, spool: Spool) -> None:
        self._log = log
        self._spool = spool
        self._queue: asyncio.Queue[Path] = asyncio.Queue(PARTS_AHEAD)
        self._task = asyncio.create_task(self._upload_all())

    async def keep(self, record: dict[str, Any]) -> None:
        """Keep a finished record; waits while the store is behind."""
        full = self._spool.append(record)
        if full is not None:
            await self._queue.put(full)

    async def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work that makes the records; an upload that fails ends it.

        Raises:
            StorageError: of the upload, or whatever the work raises.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:  # no record may come behind the last part that `finish` makes
            has_failed = not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if has_failed:
            self._task.result()
        await task

    async def finish(self) -> None:
        """Upload the parts that wait and the one begun; after an upload that failed they stay in the spool."""
        drained = asyncio.create_task(self._queue.join())
        await asyncio.wait([drained, self._task], return_when=asyncio.FIRST_COMPLETED)
        has_failed = self._task.done()
        drained.cancel()
        self._task.cancel()
        last = self._spool.close_part()
        if has_failed:
            self._task.result()
        if last is not None:
            await asyncio.to_thread(upload, self._log, last)

    async def _upload_all(self) -> None:
        while True:
            path = await self._queue.get()
            try:
                await asyncio.to_thread(upload, self._log, path)
            finally:
                self._queue.task_done()


def upload(log: BatchLog, path: Path) -> None:
    """Make a full spool file a part, then forget it."""
    log.append(path)
    path.unlink()
