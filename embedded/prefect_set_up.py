"""Pools, blocks, automation and deployments of a stack; run as a process of its own by `dflash up`.

A process of its own, because importing Prefect and the flows takes seconds, which pass while the server starts, and
because Prefect's settings hold for a whole process. It prints one line for each step that is done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path

from prefect.cli import app
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect_aws import AwsClientParameters, AwsCredentials

from dflash.errors import DflashError, ServiceError
from embedded.prefect_settings import HEARTBEAT_S
from embedded.seaweedfs import find_seaweedfs
from embedded.stack_set_up import POOLS, S3_BLOCK, STEP, ZOMBIE_AUTOMATION, read_entrypoints
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
    save_s3_block(folder)
    save_zombie_automation()
    deploy(args.deployments)
    print(f"{STEP}deployments", flush=True)  # noqa: T201


def create_pools(templates: Path) -> None:
    """Create or update the process work pools."""
    with get_client(sync_client=True) as client:
        for name, limit in POOLS.items():
            template = json.loads((templates / f"process-{name}.json").read_text())
            pool = WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
            client.create_work_pool(pool, overwrite=True)


def save_s3_block(folder: StackFolder) -> None:
    """Store the credentials of the embedded object store where flow runs on any pool find them."""
    server = find_seaweedfs(folder.s3)
    if server is None:
        raise ServiceError(f"the object store of {folder.path} does not answer; run `dflash up` again")
    credentials = server.credentials
    AwsCredentials(
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        region_name=credentials.region,
        aws_client_parameters=AwsClientParameters(endpoint_url=credentials.endpoint_url),
    ).save(S3_BLOCK, overwrite=True)


def save_zombie_automation() -> None:
    """Let the server mark a flow run Crashed that sent heartbeats and then nothing for three intervals."""
    automation = AutomationCore(
        name=ZOMBIE_AUTOMATION,
        description="Marks a flow run Crashed when its process is gone and no worker noticed.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=3 * HEARTBEAT_S),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {3 * HEARTBEAT_S} s")],
    )
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(ZOMBIE_AUTOMATION):
            client.create_automation(automation)


def deploy(deployments: Path) -> None:
    """Create or update all deployments, as `prefect deploy --all --no-prompt` does.

    Raises:
        ServiceError: Prefect refused; its output says which deployment and why.
    """
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise ServiceError(f"`prefect deploy --all --prefect-file {deployments}` failed") from end


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
