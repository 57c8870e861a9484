"""Where a run's process finds credentials and its working folder: the only place that reads the environment."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect.blocks.system import Secret
from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from dflash.data.workspace import Workspace
from dflash.errors import UsageError
from dflash.storage import S3Credentials
from dflash.validation import problems_of

if TYPE_CHECKING:
    from prefect_aws import AwsCredentials

log = logging.getLogger(__name__)


class Settings(BaseSettings):
    """Environment variables `DFLASH_*`.

    Attributes:
        home: folder of the embedded servers, caches and spools.
        s3_block: name of the Prefect block with the S3 credentials.
        api_key: sent to the endpoints of a generation.
        api_key_block: name of the Prefect Secret block that holds it, where the variable isn't set.
    """

    model_config = SettingsConfigDict(env_prefix="DFLASH_", extra="ignore")

    home: Path = Path(".dflash")
    s3_block: str = "dflash-s3"
    api_key: SecretStr | None = None
    api_key_block: str = "dflash-api-key"

    @property
    def work(self) -> Path:
        """Folder of downloads and spooled shards; may be emptied when nothing runs."""
        return self.home / "work"

    @property
    def cache(self) -> Path:
        """Folder of checked copies of immutable objects; may be emptied at any time."""
        return self.home / "cache"


class _AwsEnvironment(BaseSettings):
    """The variables that every AWS tool reads."""

    model_config = SettingsConfigDict(env_prefix="AWS_", extra="ignore")

    endpoint_url: str | None = Field(
        default=None, validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    )
    region: str = Field(default="us-east-1", validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"))
    access_key_id: str | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = Field(default=None)


def log_to_run() -> None:
    """Let INFO lines of the library reach the flow run's log: Prefect forwards the loggers, but sets no level."""
    for name in ("dflash", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)


def settings() -> Settings:
    """Settings of this process."""
    return Settings()


def workspace() -> Workspace:
    """Where runs of this process keep downloads, spools and checked copies."""
    return Workspace(settings().work, settings().cache)


def api_key() -> str | None:
    """Key for the endpoints of a generation: `DFLASH_API_KEY`, else the Secret block, else none.

    Raises:
        UsageError: it can't be sent; the message doesn't repeat it.
    """
    given, where = settings().api_key, "DFLASH_API_KEY"
    if given is None:
        where = f"the Prefect block {settings().api_key_block}"
        try:
            given = SecretStr(str(cast("Secret[str]", Secret.load(settings().api_key_block)).get()))
        except ValueError:  # Prefect's answer for a block that doesn't exist
            return None
    key = given.get_secret_value().strip()  # what is pasted into a form often ends with a line break
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"The key of {where} can't be sent: expected one line of ASCII. Store it again.")
    return key or None


@functools.cache
def s3_credentials() -> S3Credentials:
    """Credentials of this process: the AWS variables if they are set, else the Prefect block.

    Raises:
        UsageError: they can't be used; the message repeats none of them.
    """
    environment = _AwsEnvironment()
    if environment.access_key_id is not None:
        return _checked("the AWS variables", **environment.model_dump())
    block = _load_block(settings().s3_block)
    if block is None:
        return _checked("the AWS variables", **environment.model_dump())
    frozen = block.get_boto3_session().get_credentials().get_frozen_credentials()
    return _checked(
        f"the Prefect block {settings().s3_block}",
        endpoint_url=block.aws_client_parameters.endpoint_url,
        region=block.region_name or environment.region,
        access_key_id=frozen.access_key,
        secret_access_key=frozen.secret_key,
        session_token=frozen.token,
    )


def _checked(where: str, **values: Any) -> S3Credentials:
    try:
        return S3Credentials(**values)
    except ValidationError as error:
        raise UsageError(f"The S3 credentials of {where} can't be used: {problems_of(error, 'they')}.") from None


def _load_block(name: str) -> AwsCredentials | None:
    from prefect_aws import AwsCredentials  # brings boto3: a second of work for runs that need no block

    try:
        return cast("AwsCredentials", AwsCredentials.load(name))
    except ValueError:  # Prefect's answer for a block that doesn't exist
        log.info("no Prefect block %s and no AWS_ACCESS_KEY_ID: going on without credentials", name)
        return None
