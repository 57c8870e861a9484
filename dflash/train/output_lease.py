"""One trainer at a time for an output on S3, on whatever machine.

A lock of the kernel keeps the trainers of one machine apart; machines have only the store between them. So a trainer
renews `<output>/lease.json` every 20 s, each time on the condition that it is still as this trainer wrote it.

No clock is compared with another's: who finds a lease watches it by its own clock and takes it over when it stood still
for 90 s. The trainer that it is taken from (suspended, or cut off from the store) learns it at its next renewal, and at
the latest before its next upload, and ends. What remains is a pause between that look and the end of the upload:
checkpoints are named by content and their record is put last, so then the later record stands, whole.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dflash.data.copying import mark_of
from dflash.errors import ObjectNotFoundError, PreconditionError, StorageError, TrainingError
from dflash.storage import Store

log = logging.getLogger(__name__)

LEASE: Final = "lease.json"
RENEW_S: Final = 20.0
STALE_S: Final = 90.0
_MAX_BYTES: Final = 1 << 20
_PLACE: Final = ".place"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long things may take.

    Attributes:
        wait_s: how long a trainer that is alive elsewhere is waited for.
        renew_s: between two renewals.
        stale_s: how long a lease stands still until it may be taken over.
        poll_s: between two looks at another's lease.
    """

    wait_s: float
    renew_s: float = RENEW_S
    stale_s: float = STALE_S
    poll_s: float = 2.0


@dataclass(slots=True)
class OutputLease:
    """A lease that is held; made by `hold_output`.

    Attributes:
        store: rooted at the output.
        place: of the run folder: see `place_of`.
        lost: another trainer has taken the output over.
    """

    store: Store
    place: str
    lost: bool = field(default=False, init=False)
    _holder: str = field(default_factory=lambda: secrets.token_hex(16), init=False)
    _etag: str | None = field(default=None, init=False)
    _renewals: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def renew(self) -> None:
        """Say that this trainer lives, and find out whether the output is still its own.

        Raises:
            TrainingError: another trainer has taken it over.
            StorageError: the store can't be reached.
        """
        with self._lock:
            self._renewals += 1
            try:
                self._etag = self.store.replace(LEASE, self._content(), if_match=self._etag)
            except PreconditionError as error:
                self._etag = self._own_etag(error)
                self._etag = self.store.replace(LEASE, self._content(), if_match=self._etag)

    def take(self, mark: str | None) -> bool:
        """Try to take the lease that was found with this ETag; false where somebody was faster."""
        with self._lock:
            try:
                self._etag = self.store.replace(LEASE, self._content(), if_match=mark)
            except PreconditionError:
                return False
        return True

    def release(self) -> None:
        """Let others take it at once; a lease that isn't ours any more stays as it is."""
        with self._lock:
            try:
                self.store.replace(LEASE, self._content(released=True), if_match=self._etag)
            except PreconditionError:
                return
            except StorageError as error:
                log.warning("%s/%s couldn't be released, so others wait for it: %s", self.store.uri, LEASE, error)

    def _own_etag(self, conflict: PreconditionError) -> str:
        """The ETag of a renewal of ours whose answer was lost, else the news that the output is another's."""
        mark, found = _look(self.store)
        if found.get("holder") == self._holder and mark is not None:
            return mark
        self.lost = True
        raise TrainingError(
            f"Another trainer ({_describe(found)}) has taken over {self.store.uri}, as this one hadn't renewed its "
            f"lease for {STALE_S:.0f} s. Nothing more is written there. Let the other one work; if this is the one to "
            "keep, end the other and start this run again."
        ) from conflict

    def _content(self, *, released: bool = False) -> bytes:
        fields = {
            "format_version": 1,
            "holder": self._holder,
            "place": self.place,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "renewals": self._renewals,
            "released": released,
        }
        return json.dumps(fields, sort_keys=True).encode()


@contextmanager
def hold_output(store: Store, place: str, times: LeaseTimes) -> Iterator[OutputLease]:
    """Keep other trainers out of an output while the context is open.

    Args:
        store: rooted at the output.
        place: of the run folder, which the caller has locked: another trainer in it has ended.
        times: see there.

    Raises:
        TrainingError: another trainer is alive, and still so after `times.wait_s`.
        StorageError: the store can't be used.
    """
    lease = OutputLease(store, place)
    _wait_for(lease, times)
    ended = threading.Event()
    thread = threading.Thread(target=_renew_until, args=(lease, ended, times.renew_s), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        if not lease.lost:
            lease.release()


def place_of(run_dir: Path) -> str:
    """A name for a run folder that no other folder has, on whatever machine; made once."""
    path = run_dir / _PLACE
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(secrets.token_hex(16), encoding="ascii")
        part.replace(path)
    return path.read_text(encoding="ascii")


def _wait_for(lease: OutputLease, times: LeaseTimes) -> None:
    """Take the lease when it is free: released, of this very folder, or not renewed for long enough."""
    started = still_since = time.monotonic()
    mark, found = _look(lease.store)
    told = renewed = False
    while not (_may_take(lease, mark, found, time.monotonic() - still_since >= times.stale_s) and lease.take(mark)):
        waited_s = time.monotonic() - started
        if renewed and waited_s >= times.wait_s:
            raise TrainingError(
                f"Another trainer ({_describe(found)}) works on {lease.store.uri}, and has done so for {waited_s:.0f} "
                "s. Let it end, or choose another output."
            )
        if not told:
            told = True
            log.warning(
                "%s is another trainer's (%s): waiting until it ends, or has been silent for %.0f s",
                *(lease.store.uri, _describe(found), times.stale_s),
            )
        time.sleep(times.poll_s)
        before = mark
        mark, found = _look(lease.store)
        if mark != before:
            renewed, still_since = True, time.monotonic()


def _may_take(lease: OutputLease, mark: str | None, found: dict[str, Any], is_stale: bool) -> bool:
    return mark is None or is_stale or found.get("released") is True or found.get("place") == lease.place


def _look(store: Store) -> tuple[str | None, dict[str, Any]]:
    """The ETag and the content of a lease; what can't be read holds nobody's name, and is waited for all the same."""
    mark = mark_of(store, LEASE)
    if mark is None:
        return None, {}
    try:
        content = json.loads(store.read(LEASE, max_bytes=_MAX_BYTES))
    except (ValueError, RecursionError, ObjectNotFoundError, PreconditionError):
        return mark, {}
    return mark, content if isinstance(content, dict) else {}


def _describe(found: dict[str, Any]) -> str:
    """Who holds a lease; what others wrote is shown bounded."""
    return f"process {str(found.get('pid'))[:20]!r} of machine {str(found.get('host'))[:80]!r}"


def _renew_until(lease: OutputLease, ended: threading.Event, renew_s: float) -> None:
    """Renew; a store that is away is asked again, since its outage must not end a step."""
    while not ended.wait(renew_s):
        try:
            lease.renew()
        except StorageError as error:
            log.warning("the lease of %s couldn't be renewed: %s", lease.store.uri, error)
        except TrainingError as error:
            log.warning("%s", error)  # raised where something would be written
            return
