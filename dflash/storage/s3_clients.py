"""How the two S3 clients are set up: obstore for bytes, botocore for listings, copies and large uploads.

obstore is the fastest client measured and checks what it uploads, but it can neither see nor abort uploads, copy over
5 GB nor complete an upload conditionally. Neither client verifies downloads to our satisfaction: `s3.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from dflash.errors import UsageError
from dflash.storage.retry import TransferLimits
from dflash.validation import check_address

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential


class S3Credentials(BaseModel):
    """Where an S3 server is and who asks. Key and secret are given together, or left out together."""

    # A message of pydantic's would repeat a key beside what is wrong with it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint_url: str | None = Field(
        default=None,
        pattern=r"^[^/]*//[^/]+/?$",
        description="Server address such as http://127.0.0.1:8333; AWS if empty.",
    )
    region: str = Field(default="us-east-1", min_length=1, description="Region name; most other servers ignore it.")
    access_key_id: str | None = Field(
        default=None, min_length=1, description="Access key; if empty the client's own chain (role, profile) is asked."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="Token of temporary credentials.")

    @field_validator("endpoint_url")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        return None if url is None else check_address(url)

    @model_validator(mode="after")
    def _check_pairs(self) -> S3Credentials:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key are given together or not at all")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        return self

    @property
    def allow_http(self) -> bool:
        """Whether the endpoint is asked without TLS."""
        return self.endpoint_url is not None and self.endpoint_url.startswith("http://")

    @property
    def is_loopback(self) -> bool:
        """Whether the endpoint is on this machine, where no proxy may stand between."""
        host = urlsplit(self.endpoint_url or "").hostname or ""
        return host in {"localhost", "::1"} or host.startswith("127.")


def open_obstore(bucket: str, credentials: S3Credentials, limits: TransferLimits) -> obstore.store.S3Store:
    """Open the client for bytes: one try a call (retries are ours), SHA256 on uploads, deadlines on every read.

    obstore fills whatever isn't given from AWS_* variables (AWS_SESSION_TOKEN beside our own keys makes every request
    fail, AWS_ENDPOINT_URL_S3 wins over `endpoint`), so endpoint and credentials are given in the strongest form.
    """
    endpoint = credentials.endpoint_url or f"https://s3.{credentials.region}.amazonaws.com"
    client_options: ClientConfig = {
        "allow_http": credentials.allow_http,
        "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        "read_timeout": timedelta(seconds=limits.read_timeout_s),
        "timeout": timedelta(seconds=limits.object_timeout_s),
    }
    if credentials.is_loopback:
        # The one way to keep it from the proxy of HTTP_PROXY: name one, and except this machine from it.
        client_options["proxy_url"] = "http://127.0.0.1:9"
        client_options["proxy_excludes"] = "localhost,127.0.0.0/8,::1"
    return obstore.store.S3Store(
        bucket,
        aws_endpoint_url_s3=endpoint.rstrip("/"),
        region=credentials.region,
        virtual_hosted_style_request=False,
        checksum_algorithm="SHA256",
        skip_signature=False,
        client_options=client_options,
        retry_config={"max_retries": 0},
        credential_provider=_credential_provider(credentials),
    )


def open_botocore(credentials: S3Credentials, limits: TransferLimits, *, read_timeout_s: float) -> Any:
    """Open a botocore S3 client: one try a call, no checksum trailers (we send the sums ourselves).

    Its own session is made because boto3's default session is not safe to share between threads.
    """
    import boto3.session  # half a second that plain reads and local folders don't need
    from botocore.config import Config

    keys: dict[str, str | None] = {}
    if credentials.access_key_id is not None and credentials.secret_access_key is not None:
        token = credentials.session_token
        keys = {
            "aws_access_key_id": credentials.access_key_id,
            "aws_secret_access_key": credentials.secret_access_key.get_secret_value(),
            "aws_session_token": token.get_secret_value() if token else None,
        }
    return boto3.session.Session().client(
        "s3",
        endpoint_url=credentials.endpoint_url or f"https://s3.{credentials.region}.amazonaws.com",
        region_name=credentials.region,
        config=Config(
            connect_timeout=limits.connect_timeout_s,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Parts carry a SHA256 among the signed headers; signing the payload would hash it once more.
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=32,
            proxies={} if credentials.is_loopback else None,
        ),
        **keys,
    )


def _credential_provider(credentials: S3Credentials) -> Callable[[], S3Credential]:
    access_key_id, secret = credentials.access_key_id, credentials.secret_access_key
    if access_key_id is None or secret is None:
        return _chain_credentials()
    token = credentials.session_token.get_secret_value() if credentials.session_token else None
    fixed: S3Credential = {
        "access_key_id": access_key_id,
        "secret_access_key": secret.get_secret_value(),
        "token": token,
        "expires_at": None,
    }
    return lambda: fixed


def _chain_credentials() -> Callable[[], S3Credential]:
    """Ask botocore's chain, so that both clients sign as the same person."""
    import boto3.session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.session.Session()
    if session.get_credentials() is None:
        raise UsageError(
            "no S3 credentials: none were given, and the AWS chain (role, profile, AWS_ACCESS_KEY_ID) has none either; "
            "give an S3 credentials block or access_key_id and secret_access_key"
        )
    return Boto3CredentialProvider(session)
