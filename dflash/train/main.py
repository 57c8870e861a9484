"""A trainer process: `python -m dflash.train.main JOB.json`, or one rank of them (`dflash.train.start_ranks`).

Reads a `TrainJob`, writes `JOB.result.json`. It reads no environment variables but those that say which rank it is,
which are `torchrun`'s; S3 keys come from the client's own chain.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflash.errors import DflashError
from dflash.model.device import choose_device
from dflash.storage import S3Credentials
from dflash.train.job import Places, Watch, train_run, use_device
from dflash.train.launch import TrainJob, write_result
from dflash.train.leash import should_stop
from dflash.train.meeting import Meeting
from dflash.train.stopping import stop_on_signal
from dflash.train.world import join


def main(path: Path, descriptor: int | None = None) -> int:
    """Run the job; return the exit code.

    Args:
        path: of the job.
        descriptor: of a rank: the socket through which they find each other.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    job = TrainJob.model_validate_json(path.read_bytes())
    try:
        with stop_on_signal(signal.SIGTERM, signal.SIGINT) as signalled:
            result = _train(job, Watch(lambda: signalled() or should_stop(path)), descriptor)
    except DflashError as error:
        write_result(path, {"error": type(error).__name__, "message": str(error)})
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if result:
        write_result(path, result)
    return 0


def _train(job: TrainJob, watch: Watch, descriptor: int | None) -> dict[str, Any]:
    places = Places(job.work, S3Credentials(endpoint_url=job.endpoint_url, region=job.region))
    device = choose_device(job.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    use_device(job.run, device)
    if descriptor is None and not dist.is_torchelastic_launched():
        return train_run(job.run, places, watch, device)
    meeting = None if descriptor is None else Meeting.of(os.environ, descriptor)
    with join("nccl" if device.type == "cuda" else "gloo", meeting=meeting):
        return train_run(job.run, places, watch, device)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
