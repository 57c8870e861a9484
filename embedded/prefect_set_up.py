"""Pools, blocks, automations and deployments of a stack; run as a process of its own by `dflash up`.

A process of its own, because importing Prefect and the flows takes seconds, which pass while the server starts, and
because Prefect's settings hold for a whole process. It prints one line for each step that is done.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from dflash.errors import DflashError, ServiceError
from embedded.apply_deployments import create_pools, deploy, save_automations, save_s3_block
from embedded.seaweedfs import find_seaweedfs
from embedded.stack_set_up import STEP, read_entrypoints
from embedded.stack_state import StackFolder


def main(arguments: list[str] | None = None) -> None:
    """Set up the server that the active profile names.

    Raises:
        UsageError: the deployments file or a pool template can't be used.
        ServiceError: the server did not answer, or a deployment failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--deployments", type=Path, required=True)
    args = parser.parse_args(arguments)
    folder = StackFolder(args.project)
    state = folder.read()
    if state is None:
        raise ServiceError(f"{folder.path} holds no stack")
    _import_flows(args.deployments)
    state.api.wait_until_healthy(180, is_running=lambda: True)
    create_pools(args.deployments.parent / "pools")
    print(f"{STEP}pools", flush=True)  # noqa: T201 - the protocol with the parent process
    save_credentials(folder)
    save_automations()
    deploy(args.deployments)
    print(f"{STEP}deployments", flush=True)  # noqa: T201


def save_credentials(folder: StackFolder) -> None:
    """Store the credentials of the embedded object store where flow runs on any pool find them."""
    server = find_seaweedfs(folder.s3)
    if server is None:
        raise ServiceError(f"the object store of {folder.path} does not answer; run `dflash up` again")
    save_s3_block(server.credentials)


def _import_flows(deployments: Path) -> None:
    """Import the flows while the server starts: `deploy` needs them.

    Raises:
        ServiceError: a module entrypoint can't be imported.
    """
    for name, entrypoint in read_entrypoints(deployments).items():
        if ":" in entrypoint:
            continue  # a file, which Prefect loads itself
        module, _, function = entrypoint.rpartition(".")
        try:
            getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ServiceError(f"{deployments}: deployment {name}: no flow {entrypoint}: {error!r}") from error


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:
        sys.exit(f"{type(error).__name__}: {error}")
