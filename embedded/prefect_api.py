"""The few calls to a local Prefect server that must work without importing Prefect, which takes seconds."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from dflash.errors import ServiceError

HOST = "127.0.0.1"
FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class LocalPrefectApi:
    """A Prefect server on the loopback interface.

    Attributes:
        port: its TCP port.
        busy_s: how long a request is repeated while the server answers 503. It does so when SQLite was locked for too
            long, having done nothing, so that every kind of request may be repeated.
    """

    port: int
    busy_s: float = 30.0

    @property
    def url(self) -> str:
        """The API address that Prefect's clients take."""
        return f"http://{HOST}:{self.port}/api"

    @property
    def ui_url(self) -> str:
        """The address to open in a browser."""
        return f"http://{HOST}:{self.port}"

    def get(self, path: str, timeout_s: float = 30) -> Any:
        """GET `/api<path>`; see `_request` for the errors."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 30) -> Any:
        """POST JSON to `/api<path>`; see `_request` for the errors."""
        return self._request("POST", path, json.dumps(body).encode(), timeout_s)

    def is_healthy(self) -> bool:
        """Whether the server answers its health check with true, asked once."""
        try:
            return replace(self, busy_s=0.0).get("/health", timeout_s=5) is True
        except ServiceError:
            return False

    def wait_until_healthy(self, timeout_s: float, *, is_running: Callable[[], bool]) -> None:
        """Wait for the health check.

        Args:
            timeout_s: how long to wait at most.
            is_running: asked each time, so that a process that died ends the wait at once.

        Raises:
            ServiceError: the process ended or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            if not is_running():
                raise ServiceError(f"the Prefect server ended before it answered on {self.ui_url}")
            if time.monotonic() > deadline:
                raise ServiceError(f"the Prefect server did not answer on {self.ui_url} within {timeout_s:.0f} s")
            time.sleep(0.1)

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        """Send a request, without proxies, again after growing waits while the server is busy.

        Raises:
            ServiceError: no connection, a status other than 2xx, or a body that isn't JSON.
        """
        where = f"{method} {self.url}{path}"
        deadline, wait_s = time.monotonic() + self.busy_s, FIRST_WAIT_S
        try:
            status, content = self._exchange(method, path, body, timeout_s)
            while status == HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() + wait_s <= deadline:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                status, content = self._exchange(method, path, body, timeout_s)
            if not 200 <= status < 300:
                raise ServiceError(f"{where}: status {status}: {content[:300]!r}")
            return json.loads(content) if content else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceError(f"{where}: {error!r}") from error

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """One request on a connection of its own: its status and content."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            connection.request(method, f"/api{path}", body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
