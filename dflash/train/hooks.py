"""What a caller attaches to a run, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash.train.memory_watch import MemoryWatch
from dflash.train.resume import DataIdentity
from dflash.train.world import World


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a caller may attach.

    Attributes:
        should_stop: asked before each step; true saves a checkpoint and ends the run as resumable.
        upload: takes each finished checkpoint elsewhere, in a background thread of rank 0.
        on_step: gets each step's metrics on rank 0.
        identity: what the run is trained on; kept in its checkpoints, and the same when it is resumed.
        world: the ranks that train; all by default.
        memory: what was planned; each step's metrics hold it beside what was measured.
    """

    should_stop: Callable[[], bool] = lambda: False
    upload: Callable[[Path], None] | None = None
    on_step: Callable[[dict[str, Any]], None] | None = None
    identity: DataIdentity | None = None
    world: World | None = None
    memory: MemoryWatch | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: `finished`, or `stopped` on request: the same call resumes it.
        step: optimiser steps done in all.
        checkpoint: the newest one, which holds the result.
        loss: of the last step; None where none could be told.
        skipped_rows: rows left out because something wasn't finite.
        seconds: wall clock of its steps, resumed ones included; saving and waiting for data are left out.
        halved: packs and their blocks are split since an out-of-memory error.
    """

    status: Literal["finished", "stopped"]
    step: int
    checkpoint: Path
    loss: float | None
    skipped_rows: int
    seconds: float
    halved: bool
