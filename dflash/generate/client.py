"""One try of one request over HTTP: a record, or the reason why there is none.

aiohttp and not the `openai` client: that one costs 5 to 7 CPU-milliseconds a request (measured, see
`docs/decisions.md`), aiohttp a tenth of it.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import msgspec

from dflash.data.quality_report import printable
from dflash.data.records import Reason
from dflash.data.strict_json import parse_json
from dflash.errors import RecordError, ServiceError
from dflash.generate.answers import Failure, make_record
from dflash.generate.requests import Dialect, Request, Sampled

MAX_REPLY_BYTES: Final = 256 << 20
_SHOWN = 300  # characters of a server's message
_MODELS_NAMED = 10
_CONNECT_S = 10
_OVERLOADED = {429: "too_many_requests", 503: "overloaded", 529: "overloaded"}
_FATAL = {401: "unauthorised", 403: "forbidden", 404: "not_found"}
_MAX_RETRY_AFTER_S = 300.0
# What vLLM, SGLang and OpenAI say of a prompt that doesn't fit.
_TOO_LONG = re.compile(rb"(?i)context[_ ]length|maximum context|longer than the model")


@dataclass(frozen=True, slots=True)
class Client:
    """A connection pool and how its servers are asked.

    Attributes:
        session: holds the API key.
        dialect: the kind of server.
        timeout_s: longest wait for one answer.
    """

    session: aiohttp.ClientSession
    dialect: Dialect
    timeout_s: float

    async def ask(self, endpoint: str, request: Request, attempt: int) -> dict[str, Any] | Failure:
        """Make one try."""
        try:
            sent = self.dialect.body(request)
        except RecordError as error:
            return Failure("unusable_prompt", str(error), may_retry=False)
        reply = await self._post(self.dialect.url(endpoint), msgspec.json.encode(sent))
        if isinstance(reply, Failure):
            return reply
        status, retry_after, data = reply
        if status != 200:
            return _refusal(status, data, retry_after)
        sampled = self._read(data, sent)
        return sampled if isinstance(sampled, Failure) else make_record(request, sampled, endpoint, attempt)

    async def _post(self, url: str, body: bytes) -> tuple[int, str | None, bytes] | Failure:
        """Status, Retry-After and body of a reply that came whole."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.session.post(url, data=body, allow_redirects=False) as response,
            ):
                data = await _read(response)
                status, retry_after = response.status, response.headers.get("Retry-After")
        except aiohttp.ConnectionTimeoutError:
            why = f"no connection within {_CONNECT_S} s"
            return Failure("no_connection", why, is_fault=True)
        except TimeoutError:
            return Failure("timeout", f"no answer within {self.timeout_s:g} s", is_pressure=True, is_fault=True)
        except aiohttp.ClientConnectorError as error:
            return Failure("no_connection", _brief(error), is_fault=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Failure("broken_connection", _brief(error), is_fault=True)
        if data is None:
            return Failure("too_large", f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB", may_retry=False)
        return status, retry_after, data

    def _read(self, data: bytes, sent: dict[str, Any]) -> Sampled | Failure:
        try:
            reply = parse_json(data)
        except RecordError as error:
            # Half a character is what the model sampled: the same seed would give it again.
            return Failure("broken_json", error.message, other_seed=error.reason == Reason.INVALID_UNICODE)
        try:
            return self.dialect.read(reply, sent)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return Failure("bad_reply", f"{type(error).__name__}: {error} in {data[:_SHOWN]!r}")


def open_session(api_key: str | None, max_in_flight: int) -> aiohttp.ClientSession:
    """A pool of connections; call inside the event loop."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=max_in_flight, limit_per_host=0, ttl_dns_cache=300)
    # Waiting is bounded by the try's own time; the library's total of five minutes is shorter than a long answer.
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=_CONNECT_S)
    jar = aiohttp.DummyCookieJar()  # looking for cookies costs each request time, and there are none
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, cookie_jar=jar, trust_env=False)


async def find_model(session: aiohttp.ClientSession, endpoints: tuple[str, ...]) -> str:
    """The only model that the endpoints which answer serve.

    Raises:
        ServiceError: none answers, or they serve several; names what was found.
    """
    found = await asyncio.gather(*(_models_of(session, endpoint) for endpoint in endpoints))
    served = {name for names, _ in found for name in names}
    if len(served) == 1:
        return served.pop()
    listed = "\n".join(text for _, text in found)
    raise ServiceError(
        f"Expected endpoints that serve one and the same model, found:\n{listed}\n"
        "Check endpoint and API key, or give `model`."
    )


async def _models_of(session: aiohttp.ClientSession, endpoint: str) -> tuple[list[str], str]:
    """Names of the models that an endpoint serves, and a line that says what was found."""
    try:
        async with asyncio.timeout(10), session.get(f"{endpoint}/models", allow_redirects=False) as response:
            data = await _read(response) or b""
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        return [], f"  {endpoint}/models: {type(error).__name__}: {_brief(error)}"
    try:
        names = [str(item["id"]) for item in parse_json(data)["data"]]
    except (RecordError, LookupError, TypeError):
        return [], f"  {endpoint}/models: no list of models, but status {response.status}: {_shown(data)}"
    more = f" and {len(names) - _MODELS_NAMED} more" if len(names) > _MODELS_NAMED else ""
    return names, f"  {endpoint} serves {printable(', '.join(names[:_MODELS_NAMED])) or 'no model'}{more}"


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None where it is too large."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _refusal(status: int, data: bytes, retry_after: str | None) -> Failure:
    text = f"status {status}: {_shown(data)}"
    if status in _OVERLOADED:
        return Failure(_OVERLOADED[status], text, is_pressure=True, retry_after_s=_seconds(retry_after))
    if status in (408, 504):
        return Failure("timeout", text, is_pressure=True, is_fault=True)
    if status >= 500:
        return Failure("server_error", text, is_fault=True, retry_after_s=_seconds(retry_after))
    if status in _FATAL:
        return Failure(_FATAL[status], text, may_retry=False, is_fatal=True)
    if status < 400:
        return Failure("redirected", text, may_retry=False, is_fatal=True)
    is_too_long = status == 413 or _TOO_LONG.search(data) is not None
    return Failure("too_long" if is_too_long else "refused", text, may_retry=False)


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for, as a number or a date; nonsense asks for nothing."""
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            at = parsedate_to_datetime(retry_after)
            seconds = (at.astimezone(UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else min(_MAX_RETRY_AFTER_S, max(0.0, seconds))


def _shown(data: bytes) -> str:
    """The beginning of what a server says, so that it can't steer a terminal."""
    return printable(data[:_SHOWN].decode(errors="replace"))


def _brief(error: BaseException) -> str:
    return printable((str(error) or type(error).__name__)[:_SHOWN])
