"""A trainer process: `python -m dflash.train.main JOB.json`, by itself or in each rank of `torchrun`.

Reads a `TrainJob`, writes `JOB.result.json`. It reads no environment variables but those of `torchrun`; S3 keys come
from the client's own chain.
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
from dflash.train.stopping import stop_on_signal
from dflash.train.world import join


def main(path: Path) -> int:
    """Run the job; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    job = TrainJob.model_validate_json(path.read_bytes())
    try:
        with stop_on_signal(signal.SIGTERM, signal.SIGINT) as signalled:
            result = _train(job, Watch(lambda: signalled() or should_stop(path)))
    except DflashError as error:
        write_result(path, {"error": type(error).__name__, "message": str(error)})
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if result:
        write_result(path, result)
    return 0


def _train(job: TrainJob, watch: Watch) -> dict[str, Any]:
    places = Places(job.work, S3Credentials(endpoint_url=job.endpoint_url, region=job.region))
    device = choose_device(job.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    use_device(job.run, device)
    if not dist.is_torchelastic_launched():
        return train_run(job.run, places, watch, device)
    with join("nccl" if device.type == "cuda" else "gloo"):
        return train_run(job.run, places, watch, device)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
