"""How far a run is: all of it goes into checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from dflash.data.batch_place import place_problem
from dflash.data.batches import BatchOrder, BatchState, ShardSource
from dflash.errors import IntegrityError
from dflash.train.checkpoint_record import RECORD, TAKE_OLDER, require_sections


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: optimiser steps done.
        batch: place in the data.
        seconds: wall clock of the steps.
        cpu_seconds: of this process.
        skipped_rows: left out because something wasn't finite.
    """

    step: int = 0
    batch: BatchState = field(default_factory=BatchState)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    skipped_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self) | {"batch": self.batch.to_json()}

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> Self:
        """Read a checkpoint's record.

        Raises:
            IntegrityError: a field is missing, unknown or no such number, or the step isn't the record's.
            UsageError: the place in the data can't be used.
        """
        require_sections(record, ("progress", "halved"), where)
        found: dict[str, Any] = record["progress"]
        names = {one.name for one in fields(cls)}
        counts: list[Any] = [found.get(name) for name in ("step", "skipped_rows")]
        times: list[Any] = [found.get(name) for name in ("seconds", "cpu_seconds")]
        whole = (
            set(found) == names
            and all(type(value) is int and value >= 0 for value in counts)
            and all(type(value) in {int, float} and 0 <= value < math.inf for value in times)
            and isinstance(found["batch"], dict)
        )
        if not whole or found["step"] != record["step"]:
            raise IntegrityError(
                f"{RECORD} of checkpoint {where} doesn't tell how far the run was: expected numbers {sorted(names)} "
                f"of step {record['step']}, found {found!r}. {TAKE_OLDER}"
            )
        return cls(**found | {"batch": BatchState.from_json(found["batch"])})

    def check_place(self, order: BatchOrder, source: ShardSource, where: str) -> None:
        """Refuse a place that no run over the data comes to.

        Args:
            order: of the run's packs.
            source: the data.
            where: which checkpoint, for messages.

        Raises:
            IntegrityError: says what of it can't be.
        """
        if problem := place_problem(order, self.batch, source):
            raise IntegrityError(
                f"{RECORD} of checkpoint {where} names a place that isn't in the data: {problem}. {TAKE_OLDER}"
            )
