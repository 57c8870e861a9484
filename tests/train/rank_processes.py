"""The ranks of a run without torchrun, so that one that dies takes no other with it.

They are forked from a server process that has torch loaded already: starting an interpreter for each takes seconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dflash.train.launch import TrainJob
from dflash.train.run import TrainRun

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dflash.train.main", "transformers.models.llama.modeling_llama"])


def rank_main(variables: dict[str, str], job: str, log: str) -> None:
    """What a rank does."""
    os.environ.update(variables)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    import torch

    from dflash.train.main import main

    torch.set_num_threads(1)
    sys.exit(main(Path(job)))


class Ranks:
    """All ranks of a run; with `stop` they are asked to stop from the beginning."""

    def __init__(self, folder: Path, run: dict[str, Any], size: int, *, stop: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        job = TrainJob(run=TrainRun.model_validate(run | {"num_processes": size}), work=folder / "work")
        path = folder / "job.json"
        path.write_text(job.model_dump_json())
        if stop:
            path.with_suffix(".stop").touch()
        self.result = folder / "job.result.json"
        self.logs = [folder / f"rank{rank}.log" for rank in range(size)]
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        common |= {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
        self.processes = []
        for rank in range(size):
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = CONTEXT.Process(target=rank_main, args=(variables, str(path), str(self.logs[rank])))
            process.start()
            self.processes.append(process)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Wait for all of them and return their exit codes; one that hangs says where."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hung:
            self.signal(rank, signal.SIGABRT)
            self.processes[rank].join(20)
        assert not hung, self.log()
        return [process.exitcode for process in self.processes]

    def log(self) -> str:
        """The ends of their logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.logs if path.exists())


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
