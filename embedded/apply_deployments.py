"""Pools, automation, blocks and deployments of this project, applied to the Prefect server of the active profile.

`dflash up` does it for its own server. For a server elsewhere:
`DFLASH_PROJECT=/var/lib/dflash python -m embedded.apply_deployments --pools kubernetes`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from prefect.cli import app
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket

from dflash.errors import DflashError, ServiceError, UsageError
from dflash.storage import S3Credentials
from embedded.prefect_settings import HEARTBEAT_S
from embedded.stack_set_up import LOST_AUTOMATION, POOLS, RESULTS_BLOCK, S3_BLOCK, ZOMBIE_AUTOMATION, read_entrypoints

KINDS = ("process", "docker", "kubernetes")
START_S = {"process": 100, "docker": 900, "kubernetes": 900}
"""Seconds that a run may take from its submission to its first heartbeat, by kind of pool: images may have to come."""
# What ends the wait for a first heartbeat: the steps before it (Running, a pull step) are no sign of a living process.
_HEARD = (
    *("heartbeat", "Completed", "Failed", "Crashed", "Cancelling", "Cancelled"),
    *("Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended"),
)
_DEPLOYMENTS = Path(__file__).resolve().parents[1] / "deployments" / "prefect.yaml"


def main(arguments: list[str] | None = None) -> None:
    """Apply everything; doing it again changes nothing.

    Raises:
        UsageError: a parameter, the deployments file or a pool template can't be used.
        ServiceError: Prefect or the object store refused.
    """
    parser = argparse.ArgumentParser(prog="python -m embedded.apply_deployments", description=__doc__)
    parser.add_argument("--pools", choices=KINDS, default="process", help="kind of the work pools cpu and b200")
    parser.add_argument("--deployments", type=Path, default=_DEPLOYMENTS, help="Prefect deployments file")
    parser.add_argument("--bucket", help="bucket to make; credentials from the AWS variables become Prefect blocks")
    args = parser.parse_args(arguments)
    if "DFLASH_PROJECT" not in os.environ:
        raise UsageError("DFLASH_PROJECT is not set: expected the folder in which flow runs work, on the workers")
    if args.bucket and not os.environ.get("AWS_ACCESS_KEY_ID"):
        raise UsageError("--bucket needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; found no AWS_ACCESS_KEY_ID")
    read_entrypoints(args.deployments)
    create_pools(args.deployments.parent / "pools", args.pools)
    save_automations(args.pools)
    if args.bucket:
        save_store(args.bucket)
    deploy(args.deployments)


def create_pools(templates: Path, kind: str = "process") -> None:
    """Create or update the work pools; those that exist keep what a person set for their queues."""
    with get_client(sync_client=True) as client:
        for name, limit in POOLS.items():
            template = json.loads((templates / f"{kind}-{name}.json").read_text())
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template, concurrency_limit=limit)
            client.create_work_pool(pool, overwrite=True)


def save_s3_block(credentials: S3Credentials) -> AwsCredentials:
    """Store credentials where flow runs on any pool find them; the secret is encrypted by the server."""
    block = AwsCredentials(
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        region_name=credentials.region,
        aws_client_parameters=AwsClientParameters(endpoint_url=credentials.endpoint_url),
    )
    block.save(S3_BLOCK, overwrite=True)
    return block


def save_store(bucket: str) -> None:
    """Make the bucket, and the blocks of its credentials and of the results that runs return to each other.

    Raises:
        UsageError: the AWS variables can't be used.
        ServiceError: the store refused.
    """
    from tasks.settings import s3_credentials

    credentials = s3_credentials()
    block = save_s3_block(credentials)
    client: Any = block.get_boto3_session().client("s3", endpoint_url=credentials.endpoint_url)
    try:
        if bucket not in {found["Name"] for found in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        raise ServiceError(f"bucket {bucket} at {credentials.endpoint_url} can't be made: {error}") from error
    finally:
        client.close()
    S3Bucket(bucket_name=bucket, bucket_folder="prefect-results", credentials=block).save(RESULTS_BLOCK, overwrite=True)


def save_automations(kind: str = "process") -> None:
    """Let the server mark flow runs Crashed whose process is gone and no worker noticed.

    One watches runs that have sent heartbeats, and runs that a worker has claimed; one watches from there to the first
    heartbeat, where a run would stay Pending for ever.
    """
    silent_s, start_s = 3 * HEARTBEAT_S, START_S[kind]
    any_event, alive = "prefect.flow-run.*", {"prefect.flow-run.heartbeat", "prefect.flow-run.Pending"}
    submitted, heard = {"prefect.flow-run.Submitting"}, {f"prefect.flow-run.{name}" for name in _HEARD}
    watches = (
        (ZOMBIE_AUTOMATION, _silence(alive, {any_event}, silent_s), f"no heartbeat for {silent_s} s"),
        (LOST_AUTOMATION, _silence(submitted, heard, start_s), f"no heartbeat within {start_s} s of its submission"),
    )
    with get_client(sync_client=True) as client:
        for name, trigger, message in watches:
            automation = AutomationCore(
                name=name,
                description="Marks a flow run Crashed when its process is gone and no worker noticed.",
                trigger=trigger,
                actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
            )
            found = client.read_automations_by_name(name)
            if not found:
                client.create_automation(automation)
            for one in found:
                client.update_automation(one.id, automation.model_copy(update={"enabled": one.enabled}))


def _silence(after: set[str], expect: set[str], seconds: int) -> EventTrigger:
    """Fires for a flow run of which nothing that was expected is heard in time."""
    return EventTrigger(
        after=after,
        expect=expect,
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )


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


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:
        sys.exit(f"{type(error).__name__}: {error}")
