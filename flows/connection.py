"""What a shell command talks to: the server and the store of the environment, of `dflash up`, or of this run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from dflash.storage import S3Credentials
from embedded.stack import find_stack, prefect_for_run


def project() -> Path:
    """The folder whose `.dflash/` holds the stack: where the command was called."""
    return Path.cwd()


def home() -> Path:
    """Folder of caches and of what runs keep on this machine."""
    return Path(os.environ.get("DFLASH_HOME", project() / ".dflash"))


def cache() -> Path:
    """Folder of checked copies of immutable objects."""
    return home() / "cache"


def orchestrator() -> AbstractContextManager[None]:
    """Point this process at a Prefect server; import flows inside.

    The server that PREFECT_API_URL names, else the one that `dflash up` started in this folder, else one for this run.
    """
    return prefect_for_run(project())


def store_credentials() -> S3Credentials | None:
    """Credentials of shell commands that need no flow: the AWS variables, else those of the running stack."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        from tasks.settings import s3_credentials

        return s3_credentials()
    stack = find_stack(project())
    return None if stack is None else stack.s3
