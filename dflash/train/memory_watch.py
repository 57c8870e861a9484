"""What a run's memory really came to, against what was planned, and how the allocator was set."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Measures this rank.

    Attributes:
        device: of the rank; on a CPU the whole process is measured.
        planned_bytes: what the preflight expects at the peak, all included.
        outside_bytes: what the device held before the run's first tensor: contexts and other processes.
    """

    device: torch.device
    planned_bytes: int
    outside_bytes: int = 0

    def peak_bytes(self) -> int:
        """The most so far: on CUDA what the allocator took from the device and what was there before it."""
        if self.device.type == "cuda":
            return self.outside_bytes + torch.cuda.max_memory_reserved(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def numbers(self) -> dict[str, int]:
        """Both, for a line of metrics."""
        return {"peak_bytes": self.peak_bytes(), "planned_bytes": self.planned_bytes}

    def report(self, when: str) -> None:
        """Log the peak; a warning where it is above the plan, which then says too little for other settings too."""
        peak = self.peak_bytes()
        too_much = self.device.type == "cuda" and peak > self.planned_bytes  # a process has more than tensors in it
        level = logging.WARNING if too_much else logging.INFO
        difference = 100 * (peak / self.planned_bytes - 1)
        shown = (peak / 1e9, when, self.planned_bytes / 1e9, difference)
        log.log(level, "memory: the peak is %.2f GB %s, %.2f GB were planned (%+.1f %%)", *shown)

    def to_json(self) -> dict[str, Any]:
        """For checkpoints and the run's result."""
        return {**self.numbers(), "device": str(self.device), "allocator": allocator_settings(self.device)}


def allocator_settings(device: torch.device) -> dict[str, str]:
    """How torch's allocator is set (`PYTORCH_ALLOC_CONF`): fragmentation, and so the peak, depends on it."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 (torch has no public name for it)
    found = {"settings": "unknown" if read is None else str(read())}
    if device.type == "cuda":
        found["backend"] = torch.cuda.get_allocator_backend()
    return found
