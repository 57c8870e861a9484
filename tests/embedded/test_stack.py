"""The real stack: started once for this module, killed in parts, repaired, ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from dflash.errors import ServiceError, UsageError
from embedded import stack
from embedded.marked import MARKER, find_marked
from embedded.processes import identify_process, start_process
from embedded.stack_set_up import LOST_AUTOMATION, S3_BLOCK, ZOMBIE_AUTOMATION, is_set_up
from embedded.stack_state import StackFolder, StackState
from flows import cli_stack

PROBE = Path(__file__).with_name("probe_flow.py")


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployments")
    shutil.copytree(stack.DEPLOYMENTS.parent / "pools", folder / "pools")
    file = folder / "prefect.yaml"
    file.write_text(
        "pull:\n"
        "  - prefect.deployments.steps.set_working_directory:\n"
        '      directory: "{{ $DFLASH_PROJECT }}"\n'
        "deployments:\n"
        f"  - {{name: probe, entrypoint: '{PROBE}:probe', work_pool: {{name: cpu}}}}\n"
    )
    return file


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, deployments: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    lines: list[str] = []
    try:
        assert stack.up(folder, lines.append, deployments).is_healthy
        assert [line.split()[0] for line in lines] == ["object", "Prefect", "deployments", "workers"]
        yield folder
    finally:
        stack.down(folder, lines.append)


def read_state(project: Path) -> StackState:
    state = StackFolder(project).read()
    assert state is not None
    return state


def pids(project: Path) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status(project).parts}


def ports(project: Path) -> dict[str, int | None]:
    return {part.name: part.port for part in stack.status(project).parts}


def wait_for(condition: object, timeout_s: float = 120) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.2)


def test_up_sets_up_pools_deployments_block_and_automation(project: Path) -> None:
    api = read_state(project).api
    pools = {pool["name"]: pool for pool in api.post("/work_pools/filter", {})}
    assert set(pools) == {"cpu", "b200"}
    assert pools["cpu"]["concurrency_limit"] is None
    assert pools["b200"]["concurrency_limit"] == 1
    assert pools["cpu"]["base_job_template"]["variables"]["properties"]["env"]["default"]["OMP_NUM_THREADS"] == "1"
    assert [item["name"] for item in api.post("/deployments/filter", {})] == ["probe"]
    assert {item["name"] for item in api.post("/automations/filter", {})} >= {LOST_AUTOMATION, ZOMBIE_AUTOMATION}
    (block,) = api.post("/block_documents/filter", {"block_documents": {"name": {"any_": [S3_BLOCK]}}})
    connection = stack.connect(project)
    assert block["data"]["aws_client_parameters"]["endpoint_url"] == connection.s3.endpoint_url
    assert connection.s3.secret_access_key is not None
    assert block["data"]["aws_secret_access_key"] != connection.s3.secret_access_key.get_secret_value()


def test_server_answers_what_it_would_ask_the_internet_from_its_own_copy(project: Path) -> None:
    started = time.monotonic()
    assert "prefect" in read_state(project).api.get("/collections/views/aggregate-worker-metadata")
    assert time.monotonic() - started < 10


def test_two_ups_at_once_leave_a_healthy_stack_as_it_is(project: Path, deployments: Path) -> None:
    before = pids(project)
    assert all(before.values())
    lines: list[str] = []
    with ThreadPoolExecutor(2) as executor:
        both = [executor.submit(stack.up, project, lines.append, deployments) for _ in range(2)]
        assert all(future.result().is_healthy for future in both)
    assert pids(project) == before
    assert not any(line.startswith("deployments") for line in lines)


@pytest.mark.parametrize("part", ["object-store", "prefect-server", "worker-cpu"])
def test_up_repairs_a_killed_part_and_touches_no_other(project: Path, deployments: Path, part: str) -> None:
    before, ports_before = pids(project), ports(project)
    pid = before[part]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: identify_process(pid) is None, 10)
    assert stack.up(project, str, deployments).is_healthy
    after = pids(project)
    assert after.pop(part) not in {None, before.pop(part)}
    assert after == before
    assert ports(project) == ports_before


def test_up_makes_again_what_a_person_deleted(project: Path, deployments: Path) -> None:
    state = read_state(project)
    (block,) = state.api.post("/block_documents/filter", {"block_documents": {"name": {"any_": [S3_BLOCK]}}})
    assert is_set_up(state, deployments)
    for path in ("/work_pools/b200", f"/block_documents/{block['id']}"):
        state.api._request("DELETE", path, None, 30)
        assert not is_set_up(state, deployments)
        assert stack.up(project, str, deployments).is_healthy
        assert is_set_up(state, deployments)


def test_up_finds_parts_again_whose_record_was_lost(project: Path, deployments: Path) -> None:
    before = pids(project)
    folder = StackFolder(project)
    folder.write(read_state(project).model_copy(update={"processes": {}}))
    (folder.s3 / "weed.pid").unlink()
    assert stack.up(project, str, deployments).is_healthy
    assert pids(project) == before


def test_no_secret_is_on_a_command_line_or_in_a_file_that_others_can_read(project: Path) -> None:
    secret = stack.connect(project).s3.secret_access_key
    assert secret is not None
    plain = secret.get_secret_value().encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert plain.decode() not in " ".join(process.cmdline())
    environments = [process.environ() for process in find_marked(StackFolder(project).marker)]
    assert len(environments) >= 3
    assert not any(plain.decode() in value for env in environments for value in env.values())
    holders = [path for path in (project / ".dflash").rglob("*") if path.is_file() and plain in path.read_bytes()]
    assert holders
    assert [path for path in holders if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert stat.S_IMODE((project / ".dflash").stat().st_mode) == 0o700


def test_every_part_listens_on_loopback_alone(project: Path) -> None:
    processes = find_marked(StackFolder(project).marker)
    assert len(processes) >= 4
    listening = [
        connection.laddr
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert set(ports(project).values()) - {None} <= {address.port for address in listening}


def test_another_process_finds_the_stack_without_any_variable(project: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from embedded import stack\n"
        "with stack.prefect_for_run(Path()):\n"
        "    from prefect.settings import get_current_settings\n"
        "    print(get_current_settings().api.url, get_current_settings().client.max_retries)\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "DFLASH_"))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [stack.connect(project).prefect_api_url, "6"]


def test_status_exits_with_1_when_a_part_is_dead(project: Path, deployments: Path) -> None:
    app = typer.Typer()
    app.command()(cli_stack.status)
    arguments = ["--project", str(project), "--json"]
    healthy = CliRunner().invoke(app, arguments)
    assert healthy.exit_code == 0, healthy.output
    assert [part["health"] for part in json.loads(healthy.stdout)["parts"]] == ["healthy"] * 4
    pid = pids(project)["worker-b200"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: identify_process(pid) is None, 10)
    dead = CliRunner().invoke(app, arguments)
    assert dead.exit_code == 1
    assert not json.loads(dead.stdout)["healthy"]
    stack.up(project, str, deployments)


def test_down_leaves_no_process_and_tells_the_runs_end(project: Path) -> None:
    """Last of this module: it ends the stack."""
    state, folder = read_state(project), StackFolder(project)
    (deployment,) = state.api.post("/deployments/filter", {})
    state.api.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"seconds": 500}})
    wait_for((project / "child.pid").exists)
    wait_for(lambda: (project / "child.pid").read_text().isdigit())
    child = psutil.Process(int((project / "child.pid").read_text()))
    before = {pid for pid in pids(project).values() if pid is not None}
    assert len(before) == 4
    stack.down(project, str)
    assert not child.is_running()
    assert not before & set(psutil.pids())
    assert find_marked(folder.marker) == []
    stack.down(project, str)
    assert [part.health for part in stack.status(project).parts] == ["dead"] * 4
    with contextlib.closing(sqlite3.connect(folder.home / "prefect.db")) as database:
        assert database.execute("select distinct state_type from flow_run").fetchall() == [("CRASHED",)]
    assert stack.find_stack(project) is None


def test_connect_says_what_to_do_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="dflash up"):
        stack.connect(tmp_path)
    assert stack.status(tmp_path).parts == ()


def test_down_where_nothing_was_started_creates_nothing(tmp_path: Path) -> None:
    stack.down(tmp_path, str)
    assert list(tmp_path.iterdir()) == []


def test_down_ends_processes_whose_state_file_is_damaged(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    (folder.path / "stack.json").write_text("{")
    process = start_process(
        [sys.executable, "-S", "-c", "import time; time.sleep(100)"],
        log=folder.logs / "log",
        folder=tmp_path,
        environment={**os.environ, MARKER: folder.marker},
        attached=False,
    )
    wait_for(lambda: [found.pid for found in find_marked(folder.marker)] == [process.pid], 10)
    stack.down(tmp_path, str)
    assert not process.is_running


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format_version": 2, "prefect_port": 5000}', '{"prefect_port": 0}', "\x00"]
)
def test_damaged_state_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    (folder.path / "stack.json").write_text(content)
    with pytest.raises(ServiceError, match=r"stack\.json"):
        stack.status(tmp_path)


def test_only_one_up_or_down_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedded.stack_state.LOCK_TIMEOUT_S", 0.3)
    folder = StackFolder(tmp_path)
    folder.create()
    with folder.locked(), pytest.raises(ServiceError, match="another `dflash up`"), folder.locked():
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize("name", ["it's", "a?b", "50%", "x#y"])
def test_folder_that_would_break_the_profile_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="rename the folder"):
        stack.up(tmp_path / name, str)
    assert list((tmp_path / name).iterdir()) == []
