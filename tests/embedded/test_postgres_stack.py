"""The stack with Prefect's records in PostgreSQL: started, loaded, killed in parts, ended, and started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.errors import UsageError
from embedded import stack
from embedded.marked import find_marked
from embedded.stack_state import StackFolder, StackState
from tests.embedded.postgres_folder import reachable_folder

pytestmark = pytest.mark.slow

MANY = Path(__file__).with_name("many_flow.py")
NUM_TASKS = 700


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployments")
    shutil.copytree(stack.DEPLOYMENTS.parent / "pools", folder / "pools")
    file = folder / "prefect.yaml"
    pool = "work_pool: {name: cpu}"
    file.write_text(
        "pull:\n"
        "  - prefect.deployments.steps.set_working_directory: {directory: '{{ $DFLASH_PROJECT }}'}\n"
        f"deployments:\n  - {{name: many, entrypoint: '{MANY}:many', {pool}}}\n"
    )
    return file


@pytest.fixture(scope="module")
def project(deployments: Path) -> Iterator[Path]:
    with reachable_folder() as folder:
        try:
            assert stack.up(folder, str, deployments, database="postgres").is_healthy
            yield folder
        finally:
            stack.down(folder, str)


def read_state(project: Path) -> StackState:
    state = StackFolder(project).read()
    assert state is not None
    return state


def pids(project: Path) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status(project).parts}


def test_a_later_up_needs_no_flag_and_the_other_database_is_refused_while_the_server_runs(
    project: Path, deployments: Path
) -> None:
    before = pids(project)
    assert list(before) == ["object-store", "postgres", "prefect-server", "worker-cpu", "worker-b200"]
    assert stack.up(project, str, deployments).is_healthy
    assert pids(project) == before
    with pytest.raises(UsageError, match="runs on postgres, expected sqlite: run `dflash down` first"):
        stack.up(project, str, deployments, database="sqlite")
    assert not (project / ".dflash" / "prefect" / "prefect.db").exists()


def test_seven_hundred_tasks_32_at_a_time_are_all_recorded(project: Path) -> None:
    api, log = read_state(project).api, project / ".dflash" / "prefect" / "server.log"
    (deployment,) = api.post("/deployments/filter", {"deployments": {"name": {"any_": ["many"]}}})
    run = api.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"count": NUM_TASKS}})
    deadline = time.monotonic() + 400
    while (state := api.get(f"/flow_runs/{run['id']}")["state"])["type"] not in {"COMPLETED", "FAILED", "CRASHED"}:
        assert time.monotonic() < deadline, state
        time.sleep(1)
    assert state["type"] == "COMPLETED", state
    completed = {
        "flow_runs": {"id": {"any_": [run["id"]]}},
        "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    while (count := api.post("/task_runs/count", completed)) < NUM_TASKS:  # they are recorded in batches, afterwards
        assert time.monotonic() < deadline, f"{count} of {NUM_TASKS} task runs are recorded"
        time.sleep(1)
    assert count == NUM_TASKS
    assert re.findall(r"(?i)database is locked|deadlock detected| 50[03] ", log.read_text()) == []


def test_up_repairs_a_killed_database_and_keeps_the_rest(project: Path, deployments: Path) -> None:
    before, process = pids(project), StackFolder(project).postgres.process()
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    while process.is_running:
        time.sleep(0.01)
    assert {part.name: part.health for part in stack.status(project).parts}["postgres"] == "dead"
    assert stack.up(project, str, deployments).is_healthy
    after = pids(project)
    assert after.pop("postgres") != before.pop("postgres")
    assert after == before


def test_down_ends_it_and_the_next_up_has_the_history(project: Path, deployments: Path) -> None:
    """Last of this module: it ends the stack."""
    folder = StackFolder(project)
    stack.down(project, str)
    assert find_marked(folder.marker) == []
    assert folder.postgres.process() is None
    assert [part.health for part in stack.status(project).parts] == ["dead"] * 5
    assert stack.up(project, str, deployments).is_healthy
    assert read_state(project).api.post("/flow_runs/count", {}) == 1
