"""Start all ranks of a run on this machine and end them together: `python -m dflash.train.start_ranks NUM JOB.json`.

`torchrun --standalone` does this too, but the store through which its ranks find each other listens on every address of
the machine, lets in whoever comes, and keeps pickles. Here rank 0's store gets a socket that is bound to the loopback
interface already, and gloo and NCCL are told to use that interface, as all ranks are on one machine. Needs no torch.

A rank that fails ends the others: they are asked, and killed after a while. SIGTERM and SIGINT are handed on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

LOOPBACK: Final = "127.0.0.1"
END_S: Final = 30.0
"""Time that the other ranks get to end by themselves when one has failed."""
_POLL_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of a job; return the exit code."""
    number, job = arguments
    return run_ranks([sys.executable, "-m", "dflash.train.main", job], int(number), os.environ)


def run_ranks(command: Sequence[str], number: int, environment: Mapping[str, str]) -> int:
    """Run a command once for each rank, until all have ended; only the main thread may call it.

    Args:
        command: of a rank; it gets one more argument, the descriptor of the store's socket, which rank 0 alone has.
        number: of ranks.
        environment: of the ranks; which interface gloo and NCCL use is only set where it isn't yet.

    Returns:
        0, or the exit code of the first rank that failed; 1 where a signal ended it.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with _handing_on(ranks):
        try:
            _start(ranks, command, number, environment)
            return _wait(ranks)
        finally:
            for rank in ranks:  # none is left unless starting one failed
                rank.kill()


def _start(
    ranks: list[subprocess.Popen[bytes]], command: Sequence[str], number: int, environment: Mapping[str, str]
) -> None:
    """Start the ranks; afterwards rank 0 alone holds the socket, so that it is closed once that rank is gone."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        descriptor = listening.fileno()
        common = _common(environment, number, listening.getsockname()[1])
        for rank in range(number):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            handles = [descriptor] if rank == 0 else []
            ranks.append(subprocess.Popen([*command, str(descriptor)], env=common | own, pass_fds=handles))


def _common(environment: Mapping[str, str], number: int, port: int) -> dict[str, str]:
    """What all ranks have in their environment: the variables of `torchrun`, and the interface."""
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return (
        interface
        | dict(environment)
        | {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        | {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; from the first that fails on the others have `END_S`."""
    failed, deadline = 0, float("inf")
    while running := [rank for rank in ranks if rank.poll() is None]:
        if not failed and (failed := _first_failure(ranks)):
            deadline = time.monotonic() + END_S
            for rank in running:
                rank.terminate()
        if time.monotonic() > deadline:
            for rank in running:
                rank.kill()
        time.sleep(_POLL_S)
    code = failed or _first_failure(ranks)
    return 1 if code < 0 else code


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


@contextmanager
def _handing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Hand signals on to the ranks there are; the old handlers come back at the end."""

    def hand_on(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
