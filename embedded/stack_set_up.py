"""When pools, blocks and deployments have to be applied, and the process that does it."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import yaml

from dflash.errors import ServiceError, UsageError
from embedded.marked import MARKER
from embedded.prefect_settings import process_environment
from embedded.processes import start_process, tail
from embedded.stack_state import StackFolder, StackState

STEP = "done: "
"""Begins each line with which the set-up process tells of a finished step."""

POOLS: dict[str, int | None] = {"cpu": None, "b200": 1}
"""Work pools and how many flow runs each may run at a time: one training has the GPUs."""

S3_BLOCK = "dflash-s3"
RESULTS_BLOCK = "dflash-results"
ZOMBIE_AUTOMATION = "crash-flow-runs-without-heartbeat"
LOST_AUTOMATION = "crash-flow-runs-that-do-not-start"

_REPOSITORY = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 240


class SetUp:
    """One run of `embedded.prefect_set_up`, started now.

    Args:
        folder: the stack.
        deployments: the Prefect deployments file to apply.
    """

    def __init__(self, folder: StackFolder, deployments: Path) -> None:
        read_entrypoints(deployments)
        self._log = folder.logs / "set-up.log"
        self._log.unlink(missing_ok=True)
        arguments = ["--project", str(folder.project), "--deployments", str(deployments.resolve())]
        self._process = start_process(
            [sys.executable, "-P", "-m", "embedded.prefect_set_up", *arguments],
            log=self._log,
            folder=folder.project,
            environment=set_up_environment(folder),
            attached=False,
        )

    def wait_for(self, step: str) -> None:
        """Wait until a step is done.

        Raises:
            ServiceError: the process ended before, or takes too long; the message has the end of its output.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            running = self._process.is_running  # asked before reading: its last lines are then seen
            if f"{STEP}{step}\n" in self._log.read_text(errors="replace"):
                return
            if not running or time.monotonic() > deadline:
                raise ServiceError(
                    f"applying {step} failed; {self._log} ends with:\n{tail(self._log)}\n"
                    "repair the cause and run `dflash up` again"
                )
            time.sleep(0.1)


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
    models = ["config.py", "runs.py", "eval/config.py", "generate/config.py"]
    models += [f"train/{name}.py" for name in ("config", "loss_options", "run", "target_shape")]
    files += [_REPOSITORY / "dflash" / name for name in models]
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
