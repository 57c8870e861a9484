"""What a person does in the Prefect UI, as the API calls that the UI makes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from embedded.prefect_api import LocalPrefectApi
from embedded.stack import StackConnection

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True, slots=True)
class Server:
    """The Prefect server of a stack."""

    api: LocalPrefectApi

    @classmethod
    def of(cls, stack: StackConnection) -> Server:
        port = urlsplit(stack.prefect_api_url).port
        assert port is not None
        return cls(LocalPrefectApi(port))

    def post(self, path: str, body: Any) -> Any:
        """POST, repeated while the server is busy."""
        return self.api.post(path, body)

    def start(self, deployment: str, config: dict[str, Any] | None = None) -> str:
        """Press Run; return the flow run's id."""
        (found,) = self.post("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
        body = {} if config is None else {"parameters": {"config": config}}
        return str(self.post(f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def retry(self, flow_run: str) -> None:
        """Press Retry."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the Prefect UI"}
        answer = self.post(f"/flow_runs/{flow_run}/set_state", {"state": state})
        assert answer["status"] == "ACCEPT", answer

    def cancel(self, flow_run: str) -> None:
        """Press Cancel."""
        answer = self.post(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        assert answer["status"] == "ACCEPT", answer

    def wait(self, flow_run: str, timeout_s: float = 240) -> dict[str, Any]:
        """Wait for the end of a flow run."""

        def ended() -> dict[str, Any] | None:
            found: dict[str, Any] = self.api.get(f"/flow_runs/{flow_run}")
            return found if found["state"]["type"] in FINAL else None

        run: dict[str, Any] = wait_for(ended, timeout_s)
        return run

    def table(self, flow_run: str, key: str) -> list[dict[str, Any]]:
        """The latest table artifact of a flow run."""
        rows: list[dict[str, Any]] = json.loads(self.artifacts(flow_run, key)[0]["data"])
        return rows

    def artifacts(self, flow_run: str, key: str) -> list[dict[str, Any]]:
        """All artifacts of a flow run with a key, newest first."""
        condition = {"key": {"any_": [key]}, "flow_run_id": {"any_": [flow_run]}}
        found: list[dict[str, Any]] = self.post("/artifacts/filter", {"artifacts": condition, "sort": "CREATED_DESC"})
        return found

    def executions(self, flow_run: str, name: str) -> Counter[str]:
        """How often each task run whose name starts so was started."""
        runs = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
        return Counter(run["name"] for run in runs if run["name"].startswith(name) and run["run_count"] > 0)


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Wait until a condition gives something true; return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not become true within {timeout_s} s"
        time.sleep(0.3)
    return value
