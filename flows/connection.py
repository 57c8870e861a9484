"""What a shell command talks to: the server and the store of the environment, of `dflash up`, or of this run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dflash.storage import S3Credentials
from embedded.prefect_server import temporary_prefect_server
from embedded.stack import activate, connect

HOME = Path(os.environ.get("DFLASH_HOME", ".dflash"))


@contextlib.contextmanager
def orchestrator() -> Iterator[None]:
    """Point this process at a Prefect server; import flows inside.

    The server that PREFECT_API_URL names, else the one that `dflash up` started in this folder, else one for this run.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    connection = connect(HOME)
    if connection is not None:
        activate(connection)
        yield
        return
    with temporary_prefect_server():
        yield


def store_credentials() -> S3Credentials | None:
    """Credentials of shell commands that need no flow: the AWS variables, else those of the running stack."""
    from tasks.settings import s3_credentials

    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return s3_credentials()
    connection = connect(HOME)
    return None if connection is None else connection.credentials
