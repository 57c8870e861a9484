"""The ranks of a run and what they add up.

Gradients are summed once for each step, behind the last micro-batch, not by DistributedDataParallel: ranks may then
hold different numbers of micro-batches (the end of an epoch, a skipped row, a halved pack), and the sum is divided by
the global weight instead of the number of ranks. The price is that the transfer doesn't overlap the backward pass: 6.9
GB for the 1.73 B drafter, about 40 ms over NVLink in a step of seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash.errors import PeerLostError
from dflash.train.meeting import Meeting

COLLECTIVE_S: Final = 1800.0
"""After which a collective counts as hung; a checkpoint on a slow disk is written meanwhile."""


@dataclass(frozen=True, slots=True)
class World:
    """This rank among those that train; one process alone is a world of size 1.

    Attributes:
        rank: of this process; those that train are the first of all ranks, so it is the global one.
        size: how many train.
        group: those ranks; None for all.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls) -> World:
        """Return the world that `join` set up, else a world of one."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` over all ranks, in place."""
        if self.size > 1:
            with losing_a_rank():
                dist.all_reduce(values, group=self.group)
        return values

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Add gradients over all ranks; a rank without one adds zero."""
        if self.size == 1:
            return
        handles = []
        with losing_a_rank():
            for weight in weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                handles.append(dist.all_reduce(weight.grad, group=self.group, async_op=True))
            for handle in handles:
                handle.wait()

    def spread(self, weights: Iterable[nn.Parameter]) -> None:
        """Give all ranks the weights of rank 0, in place."""
        if self.size > 1:
            with losing_a_rank():
                for weight in weights:
                    dist.broadcast(weight.data, src=0, group=self.group)

    def first_value(self, value: float) -> float:
        """Return rank 0's value on all ranks, such as its clock."""
        if self.size == 1:
            return value
        box = torch.tensor(value, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        with losing_a_rank():
            dist.broadcast(box, src=0, group=self.group)
        return float(box)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with losing_a_rank():
                dist.barrier(group=self.group)


@contextmanager
def losing_a_rank(who: str = "A rank that trains") -> Iterator[None]:
    """Turn the error of a collective whose other ranks are gone into ours; other errors pass.

    It may be held over whole steps: where weights are sharded, forward and backward passes hold collectives.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no class of their own, only its source file in their text.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise PeerLostError(
            f"{who} is gone: {str(error).splitlines()[0][:200]}. Look at its own lines in the log; the "
            "same run, started again, goes on from the newest checkpoint."
        ) from error


@contextmanager
def join(backend: str, timeout_s: float = COLLECTIVE_S, meeting: Meeting | None = None) -> Iterator[World]:
    """Join the ranks that were started together.

    Args:
        backend: `nccl` on GPUs, `gloo` on CPUs.
        timeout_s: after which a collective counts as hung.
        meeting: where they find each other; None where they were started by `torchrun`, whose variables say it.
    """
    timeout = timedelta(seconds=timeout_s)
    if meeting is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = meeting.store(timeout)
        dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout)
    try:
        yield World.current()
    finally:
        dist.destroy_process_group()
