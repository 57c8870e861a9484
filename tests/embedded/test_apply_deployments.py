"""Applying pools, blocks and deployments to a server that this project did not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest

from dflash.errors import UsageError
from embedded.stack_set_up import POOLS, RESULTS_BLOCK, S3_BLOCK, read_entrypoints
from tests.flows.server import Server

if TYPE_CHECKING:
    from embedded.stack import StackConnection

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"


def apply(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "AWS_", "DFLASH_"))}
    return subprocess.run(
        [sys.executable, "-P", "-m", "embedded.apply_deployments", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_server_gets_everything_and_again_changes_nothing(stack: StackConnection) -> None:
    server, secret = Server.of(stack), stack.s3.secret_access_key
    assert secret is not None
    environment = {
        "PREFECT_API_URL": stack.prefect_api_url,
        "DFLASH_PROJECT": str(stack.project),
        "AWS_ENDPOINT_URL_S3": str(stack.s3.endpoint_url),
        "AWS_ACCESS_KEY_ID": str(stack.s3.access_key_id),
        "AWS_SECRET_ACCESS_KEY": secret.get_secret_value(),
    }
    for _ in range(2):
        result = apply("--pools", "process", "--bucket", "another", **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        assert secret.get_secret_value() not in result.stdout + result.stderr
    client = boto3.client(
        "s3",
        endpoint_url=stack.s3.endpoint_url,
        region_name=stack.s3.region,
        aws_access_key_id=stack.s3.access_key_id,
        aws_secret_access_key=secret.get_secret_value(),
    )
    assert "another" in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    client.close()
    names = {"block_documents": {"name": {"any_": [S3_BLOCK, RESULTS_BLOCK]}}}
    assert server.post("/block_documents/count", names) == 2
    entrypoints = read_entrypoints(DEPLOYMENTS / "prefect.yaml")
    assert server.post("/deployments/count", {"deployments": {"name": {"any_": sorted(entrypoints)}}}) == len(
        entrypoints
    )
    for kind in ("docker", "kubernetes"):
        for pool in POOLS:
            template = json.loads((DEPLOYMENTS / "pools" / f"{kind}-{pool}.json").read_text())
            made = server.post("/work_pools/", {"name": f"{kind}-{pool}", "type": kind, "base_job_template": template})
            assert made["base_job_template"] == template


def test_a_folder_for_runs_is_asked_for() -> None:
    missing = apply()
    assert missing.returncode == 1
    assert "DFLASH_PROJECT is not set" in missing.stderr


def test_keys_for_a_bucket_are_asked_for_before_anything_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    from embedded import apply_deployments

    monkeypatch.setenv("DFLASH_PROJECT", "/var/lib/dflash")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setattr(apply_deployments, "create_pools", lambda *_: pytest.fail("pools were made"))
    with pytest.raises(UsageError, match="--bucket needs AWS_ACCESS_KEY_ID"):
        apply_deployments.main(["--bucket", "new"])
