"""Where a process computes: one rule and one message for training, evaluation and serving."""

from __future__ import annotations

import torch

from dflash.errors import UsageError


def choose_device(choice: str, rank: int = 0) -> torch.device:
    """Return the device of a process.

    Args:
        choice: `cpu`, `cuda`, or `auto`, which takes CUDA where there is any.
        rank: of the process on its machine; each has a GPU of its own.

    Raises:
        UsageError: it is none of these, or CUDA is wanted and there is no GPU for this rank.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and not num_gpus):
        return torch.device("cpu")
    if choice not in {"auto", "cuda"} or rank >= num_gpus:
        raise UsageError(
            f"device {choice!r} can't be used by rank {rank}: expected cpu, or cuda where there is a GPU for each "
            f"rank, or auto; {num_gpus} GPUs are visible here. Set device to cpu, or lower num_processes."
        )
    return torch.device("cuda", rank)
