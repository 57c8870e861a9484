"""Where the ranks of a run find each other: a store of rank 0 that only this machine can reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import TCPStore

from dflash.train.start_ranks import LOOPBACK


@dataclass(frozen=True, slots=True)
class Meeting:
    """This rank's way to the others that `dflash.train.start_ranks` started.

    Attributes:
        rank: of this process.
        size: of the run.
        port: on the loopback interface.
        descriptor: of the socket that is bound to it; rank 0 alone has it and serves it.
    """

    rank: int
    size: int
    port: int
    descriptor: int

    @classmethod
    def of(cls, variables: Mapping[str, str], descriptor: int) -> Self:
        """Read the variables that the starter set."""
        rank, size, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, size, port, descriptor)

    def store(self, timeout: timedelta) -> TCPStore:
        """Serve the store, or connect to it."""
        is_first = self.rank == 0
        return TCPStore(
            LOOPBACK,
            self.port,
            self.size,
            is_master=is_first,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self.descriptor if is_first else None,
        )
