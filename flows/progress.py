"""Progress of a run: one object that tasks' callbacks count into, shown in the shell and as a Prefect artifact."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

ARTIFACT_INTERVAL_S = 10.0  # an update costs the server about 86 ms of CPU


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run has done so far; bytes are input bytes as stored."""

    step: str = "planning"
    num_files: int = 0
    total_files: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    num_shards: int = 0
    total_shards: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def percent(self) -> float:
        """Share of the shards that are made, in percent."""
        return 100.0 * self.num_shards / self.total_shards if self.total_shards else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second since the start."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the shards made so far; None before the first."""
        if not self.num_shards:
            return None
        return self.seconds * (self.total_shards - self.num_shards) / self.num_shards

    def describe(self) -> str:
        """One line for a person."""
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{self.step}: {self.num_files}/{self.total_files} files, {self.num_shards}/{self.total_shards} shards, "
            f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.tokens_per_s:,.0f} tokens/s{left}"
        )


Listener = Callable[[Progress], None]
# Set by the command line around a flow that it runs in its own process.
listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("progress_listener", default=None)


class ProgressBoard:
    """Counts from many threads; tells the listener at once and the artifact now and then."""

    def __init__(self, key: str) -> None:
        self._progress = Progress()
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._listener = listener.get()
        self._shown_at = time.monotonic()
        self._artifact_id = cast("UUID", create_progress_artifact(0.0, key=key, description="planning"))

    @property
    def progress(self) -> Progress:
        """Counts so far."""
        with self._lock:
            return replace(self._progress, seconds=time.monotonic() - self._start)

    def set(self, **values: Any) -> None:
        """Set totals or the step."""
        with self._lock:
            self._progress = replace(self._progress, **values)
        self._tell()

    def add(self, **counts: int) -> None:
        """Add to counts, by name."""
        with self._lock:
            changed = {name: getattr(self._progress, name) + count for name, count in counts.items()}
            self._progress = replace(self._progress, **changed)
        self._tell()

    def show(self, *, force: bool = False) -> None:
        """Update the artifact if the last update is long enough ago; call from the flow's own thread."""
        if not force and time.monotonic() - self._shown_at < ARTIFACT_INTERVAL_S:
            return
        self._shown_at = time.monotonic()
        progress = self.progress
        update_progress_artifact(self._artifact_id, progress.percent, description=progress.describe())

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.progress)
