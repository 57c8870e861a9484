"""`dflash doctor`: what this machine is, what training lacks here, and what changed since a run's checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.storage import S3Credentials
from dflash.train.checkpoint_record import require_sections
from dflash.train.environment import Difference, differences, fingerprint, gpu_memory, missing_packages
from dflash.train.newest import newest_record


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        environment: versions, CUDA, driver, devices.
        devices: free and total bytes of each CUDA device.
        free_disk_bytes: where caches and checkpoints lie.
        checkpoint: that the environment was compared with.
        changes: since then.
        missing: packages that training needs and that aren't here.
    """

    environment: Mapping[str, str]
    devices: list[tuple[int, int]]
    free_disk_bytes: int
    checkpoint: str | None
    changes: list[Difference]
    missing: list[str]

    @property
    def problems(self) -> list[str]:
        """What stands in the way of training here, and what to do."""
        found = []
        if self.missing:
            found.append(
                f"Training lacks {', '.join(self.missing)} here. Install the extra: "
                "pip install 'dflash-pipeline[train]'."
            )
        if self.changes:
            names = ", ".join(change.name for change in self.changes)
            found.append(
                f"{len(self.changes)} properties differ from {self.checkpoint}: {names}. Install what it was trained "
                "with, or go on with `dflash train --accept-env-change`."
            )
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        rows = list(self.environment.items())
        for number, (free, total) in enumerate(self.devices):
            rows.append((f"device {number}", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"))
        if not self.devices:
            rows.append(("device", "none: CPU only"))
        rows.append(("disk", f"{self.free_disk_bytes / 1e9:.1f} GB free"))
        if self.checkpoint is not None:
            rows.append(("compared with", f"{self.checkpoint}: {len(self.changes)} differences"))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"problems": self.problems}


def examine(run: str | None, credentials: S3Credentials | None, cache: Path) -> Examination:
    """Look at this machine.

    Args:
        run: run folder or checkpoint to compare with, local or `s3://`.
        credentials: for S3.
        cache: folder whose disk is looked at.

    Raises:
        UsageError: the run has no checkpoint.
        IntegrityError: its record is damaged.
    """
    environment = fingerprint()
    where, changes = None, []
    if run is not None:
        where, record = newest_record(run, credentials)
        require_sections(record, ("environment",), where)
        changes = differences(record["environment"], environment)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    return Examination(environment, gpu_memory(), shutil.disk_usage(existing).free, where, changes, missing_packages())
