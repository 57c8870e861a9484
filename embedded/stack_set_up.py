"""When pools, blocks and deployments have to be applied, and the process that does it."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Self

import psutil
import yaml

from dflash.errors import ServiceError, UsageError
from embedded.marked import MARKER
from embedded.prefect_settings import process_environment
from embedded.processes import ProcessIdentity, start_process, tail
from embedded.stack_state import StackFolder, StackState

STEP = "done: "
"""Begins each line with which the set-up process tells of a finished step."""

POOLS: dict[str, int | None] = {"cpu": None, "b200": 1}
"""Work pools and how many flow runs each may run at a time: one training has the GPUs."""

S3_BLOCK = "dflash-s3"
RESULTS_BLOCK = "dflash-results"
ZOMBIE_AUTOMATION = "crash-flow-runs-without-heartbeat"
LOST_AUTOMATION = "crash-flow-runs-that-do-not-start"

PARAMETER_MODELS = (
    *("config.py", "runs.py", "eval/config.py", "generate/config.py"),
    *(f"train/{name}.py" for name in ("config", "loss_options", "run", "target_shape", "topology")),
)
"""Files of `dflash` that decide which parameters a deployment takes."""

_REPOSITORY = Path(__file__).resolve().parents[1]
QUIET_S = 240.0
"""Without a sign of life for so long the set-up counts as hung. On a busy machine it may take many times as long as
alone, importing and waiting for the server, so its whole time says nothing."""

LIMIT_S = 1800.0
_SOME_CPU_S = 0.05


class SetUp:
    """A process that applies things and prints a line for each step that is done.

    Args:
        process: as `start_process` gave it.
        log: gets its output.
    """

    def __init__(self, process: ProcessIdentity, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    def start(cls, folder: StackFolder, deployments: Path) -> Self:
        """Start `embedded.prefect_set_up` for a stack.

        Raises:
            UsageError: the deployments file can't be used.
        """
        read_entrypoints(deployments)
        log = folder.logs / "set-up.log"
        log.unlink(missing_ok=True)
        arguments = ["--project", str(folder.project), "--deployments", str(deployments.resolve())]
        process = start_process(
            [sys.executable, "-P", "-m", "embedded.prefect_set_up", *arguments],
            log=log,
            folder=folder.project,
            environment=set_up_environment(folder),
            attached=False,
        )
        return cls(process, log)

    def wait_for(self, step: str) -> None:
        """Wait until a step is done, for as long as the process lives and does something.

        Raises:
            ServiceError: the process ended before, or hangs; the message has the end of its output.
        """
        started = heard = time.monotonic()
        length, cpu_s = 0, 0.0
        while True:
            running = self._process.is_running  # asked before reading: its last lines are then seen
            text, used_s = self._log.read_text(errors="replace"), _cpu_s(self._process)
            if f"{STEP}{step}\n" in text:
                return
            now = time.monotonic()
            if len(text) > length or used_s > cpu_s + _SOME_CPU_S:
                heard, length, cpu_s = now, len(text), used_s
            if not running or now - heard > QUIET_S or now - started > LIMIT_S:
                why = f"hangs, with no sign of life for {now - heard:.0f} s" if running else "failed"
                raise ServiceError(
                    f"applying {step} {why}; {self._log} ends with:\n{tail(self._log)}\n"
                    "repair the cause and run `dflash up` again"
                )
            time.sleep(0.1)


def _cpu_s(process: ProcessIdentity) -> float:
    """Processor time that it has used; 0 where it has ended."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def set_up_environment(folder: StackFolder) -> dict[str, str]:
    """Environment of the set-up process and of the workers."""
    return process_environment(folder.home) | {
        MARKER: folder.marker,
        "DFLASH_HOME": str(folder.path),
        "DFLASH_PROJECT": str(folder.project),
    }


def compute_digest(folder: StackFolder, deployments: Path) -> str:
    """Digest of what decides pools, blocks and deployments: their files, the flows' signatures, the store's address."""
    files = [deployments, *sorted((deployments.parent / "pools").glob("*.json")), folder.s3 / "server.json"]
    files += sorted((_REPOSITORY / "flows").glob("*.py"))
    files += [_REPOSITORY / "dflash" / name for name in PARAMETER_MODELS]
    files += [_REPOSITORY / "embedded" / name for name in ("apply_deployments.py", "prefect_set_up.py")]
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.exists() else b""
        digest.update(f"{file.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def is_set_up(state: StackState, deployments: Path) -> bool:
    """Whether the server has all that is applied: a person may have deleted some of it, or the database."""
    wanted = {
        "deployments": sorted(read_entrypoints(deployments)),
        "work_pools": sorted(POOLS),
        "block_documents": [S3_BLOCK],
        "automations": [LOST_AUTOMATION, ZOMBIE_AUTOMATION],
    }
    return all(
        state.api.post(f"/{kind}/count", {kind: {"name": {"any_": names}}}) == len(names)
        for kind, names in wanted.items()
    )


def read_entrypoints(deployments: Path) -> dict[str, str]:
    """Entrypoints by deployment name.

    Raises:
        UsageError: the file is missing, is not a Prefect deployments file, or names a deployment twice.
    """
    try:
        content = yaml.safe_load(deployments.read_text())
        found = [(str(item["name"]), str(item["entrypoint"])) for item in content["deployments"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{deployments}: expected a Prefect deployments file, found {error!r}") from error
    names = [name for name, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{deployments} names {', '.join(twice)} more than once: Prefect keeps the last. Remove one.")
    return dict(found)
