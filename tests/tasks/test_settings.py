"""Credentials of a process: refused without being repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash.errors import UsageError
from tasks import settings


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    settings.s3_credentials.cache_clear()
    yield
    settings.s3_credentials.cache_clear()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ENDPOINT_URL": "http://user:hidden@host:8333"}, "no user, password or query"),
        ({"AWS_ENDPOINT_URL": "host:8333"}, "endpoint_url"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "together"),
    ],
)
def test_variables_that_are_no_credentials_are_named_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in ({"AWS_ACCESS_KEY_ID": "hidden", "AWS_SECRET_ACCESS_KEY": "hidden"} | variables).items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=message) as refused:
        settings.s3_credentials()
    assert "the AWS variables" in str(refused.value)
    assert "hidden" not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("given", "sent"),
    [("hidden", "hidden"), (" hidden\n", "hidden"), ("hidden\r\n", "hidden"), ("", None), ("\n", None)],
)
def test_a_key_is_sent_without_the_line_break_of_its_file(
    monkeypatch: pytest.MonkeyPatch, given: str, sent: str | None
) -> None:
    monkeypatch.setenv("DFLASH_API_KEY", given)
    assert settings.api_key() == sent


@pytest.mark.parametrize("given", ["hid\nden", "hid\tden", "hidd\u00e9n"])
def test_a_key_that_no_header_takes_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("DFLASH_API_KEY", given)
    with pytest.raises(UsageError, match="The key of DFLASH_API_KEY can't be sent") as refused:
        settings.api_key()
    assert "hid" not in str(refused.value)
