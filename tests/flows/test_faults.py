"""A fault in the middle of each long job, with real processes: a clear state, and a rerun that loses nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dflash.storage import S3Credentials, open_store
from embedded import stack as stacks
from embedded.processes import write_private
from embedded.seaweedfs import stop_seaweedfs
from embedded.stack_state import StackFolder, StackState
from tests.eval.small_run import write_target
from tests.flows.fault_jobs import FaultJob, JobMaker
from tests.flows.server import Server, wait_for

if TYPE_CHECKING:
    from embedded.stack import StackConnection

pytestmark = pytest.mark.slow

STAGES = ("tokenize", "merge", "train")
POOLS = {"tokenize": "cpu", "merge": "cpu", "train": "b200"}
NOTICED_S = 120.0
LIMIT_S = 600.0


@pytest.fixture
def server(stack: StackConnection) -> Server:
    return Server.of(stack)


@pytest.fixture
def make_job(
    stack: StackConnection,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    example_records: list[dict[str, Any]],
    smollm2_tokenizer_dir: Path,
) -> Callable[[str], FaultJob]:
    name = "".join(char if char.isalnum() else "-" for char in request.node.name)
    maker = JobMaker(
        f"s3://{stack.bucket}/faults/{name}",
        stack.s3,
        example_records,
        smollm2_tokenizer_dir,
        write_target(stack.project / "faults-target"),
        tmp_path,
    )
    return maker.make


@pytest.fixture(autouse=True)
def whole_stack(stack: StackConnection) -> Iterator[None]:
    """Mend what a test killed, so that the next one begins with all parts."""
    yield
    repair(stack)


def repair(stack: StackConnection) -> None:
    assert stacks.up(stack.project, str).is_healthy


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def read_state(stack: StackConnection) -> StackState:
    state = StackFolder(stack.project).read()
    assert state is not None
    return state


def start_midway(stack: StackConnection, server: Server, job: FaultJob) -> str:
    """Start a job by its deployment, and return its flow run when it is well under way."""
    home = stack.project / ".dflash"
    job.is_midway(home)
    flow_run = server.start(job.deployment, job.config)
    wait_for(lambda: job.is_midway(home), LIMIT_S)
    assert server.api.get(f"/flow_runs/{flow_run}")["state"]["type"] == "RUNNING"
    return flow_run


def retry_to_the_end(server: Server, flow_run: str) -> None:
    """Press Retry until it is done: a store that was just started may refuse once more."""
    count = server.api.get(f"/flow_runs/{flow_run}")["run_count"]
    server.retry(flow_run)
    wait_for(lambda: server.api.get(f"/flow_runs/{flow_run}")["run_count"] > count, LIMIT_S)
    ended = server.wait(flow_run, LIMIT_S)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_machine_that_dies_is_noticed_in_two_minutes_and_its_run_goes_on_elsewhere(
    stack: StackConnection, server: Server, make_job: Callable[[str], FaultJob], stage: str
) -> None:
    job = make_job(stage)
    flow_run = start_midway(stack, server, job)
    worker = psutil.Process(read_state(stack).processes[f"worker-{POOLS[stage]}"].pid)
    for process in (worker, *worker.children(recursive=True)):  # with the flow's process, its pool and its trainer
        kill(process.pid)
    killed = time.monotonic()
    ended = server.wait(flow_run, LIMIT_S)
    noticed_s = time.monotonic() - killed
    assert (ended["state"]["type"], ended["state"]["message"]) == ("CRASHED", "no heartbeat for 90 s")
    assert noticed_s < NOTICED_S
    repair(stack)
    retry_to_the_end(server, flow_run)
    job.check()


def test_a_machine_that_dies_while_it_starts_a_run_is_noticed_too(
    stack: StackConnection, server: Server, make_job: Callable[[str], FaultJob]
) -> None:
    """No process has sent a heartbeat yet: without a watch of its own the run would be Pending for ever."""
    job = make_job("tokenize")
    worker = psutil.Process(read_state(stack).processes["worker-cpu"].pid)
    flow_run = server.start(job.deployment, job.config)
    wait_for(lambda: server.api.get(f"/flow_runs/{flow_run}")["state"]["name"] == "Submitting", LIMIT_S)
    for process in (worker, *worker.children(recursive=True)):
        kill(process.pid)
    killed = time.monotonic()
    ended = server.wait(flow_run, LIMIT_S)
    assert (ended["state"]["type"], ended["state"]["message"]) == (
        "CRASHED",
        "no heartbeat within 100 s of its submission",
    )
    assert time.monotonic() - killed < NOTICED_S
    repair(stack)
    retry_to_the_end(server, flow_run)
    job.check()


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_outlives_a_server_that_is_killed(
    stack: StackConnection, server: Server, make_job: Callable[[str], FaultJob], stage: str
) -> None:
    job = make_job(stage)
    flow_run = start_midway(stack, server, job)
    kill(read_state(stack).processes["prefect-server"].pid)
    repair(stack)
    ended = server.wait(flow_run, LIMIT_S)
    assert (ended["state"]["type"], ended["run_count"]) == ("COMPLETED", 1), ended["state"]
    job.check()


@pytest.mark.parametrize("stage", STAGES)
def test_a_store_that_is_killed_loses_nothing(
    stack: StackConnection, server: Server, make_job: Callable[[str], FaultJob], stage: str
) -> None:
    job = make_job(stage)
    flow_run = start_midway(stack, server, job)
    weed = json.loads((stack.project / ".dflash" / "s3" / "weed.pid").read_text())
    kill(weed["pid"])
    time.sleep(5)
    repair(stack)
    ended = server.wait(flow_run, LIMIT_S)
    if ended["state"]["type"] != "COMPLETED":  # it outlasted the retries: then it says what it could not reach
        assert ended["state"]["type"] == "FAILED", ended["state"]
        assert stack.s3.endpoint_url is not None
        assert stack.s3.endpoint_url in ended["state"]["message"] or "s3://" in ended["state"]["message"]
        retry_to_the_end(server, flow_run)
    job.check()


@contextlib.contextmanager
def other_credentials(stack: StackConnection) -> Iterator[S3Credentials]:
    """The store with another secret, as after a rotation or when keys expired; the old one comes back at the end."""
    folder = stack.project / ".dflash" / "s3"
    before = (folder / "server.json").read_text()
    try:
        stop_seaweedfs(folder)
        write_private(folder / "server.json", json.dumps(json.loads(before) | {"secret_access_key": "rotated" * 6}))
        repair(stack)  # saves the block with the new secret
        yield stacks.connect(stack.project).s3
    finally:
        stop_seaweedfs(folder)
        write_private(folder / "server.json", before)
        repair(stack)


@pytest.mark.parametrize("stage", STAGES)
def test_credentials_that_expire_stop_a_run_and_its_retry_takes_the_new_ones(
    stack: StackConnection, server: Server, make_job: Callable[[str], FaultJob], stage: str
) -> None:
    job = make_job(stage)
    flow_run = start_midway(stack, server, job)
    with other_credentials(stack):
        ended = server.wait(flow_run, LIMIT_S)
        assert ended["state"]["type"] == "FAILED", ended["state"]
        assert "access refused" in ended["state"]["message"]
        retry_to_the_end(server, flow_run)
    job.check()


def test_no_secret_is_in_what_the_runs_left(stack: StackConnection) -> None:
    """Logs, states, parameters, artifacts (all in Prefect's database), objects on the store, and command lines."""
    secret = stack.s3.secret_access_key
    assert secret is not None
    plain = secret.get_secret_value().encode()
    folder = stack.project / ".dflash"
    files = [*(folder / "logs").iterdir(), *folder.glob("prefect/*.db*"), *(folder / "work").rglob("*")]
    contents = {str(path): path.read_bytes() for path in files if path.is_file()}
    assert len(contents) > 4
    store = open_store(f"s3://{stack.bucket}", stack.s3)
    contents |= {info.key: store.read(info.key) for info in store.list("")}
    assert [name for name, content in contents.items() if plain in content] == []
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if plain.decode() in " ".join(line)] == []


def run_here(stack: StackConnection, job: FaultJob, home: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a job's flow in a process of its own, as a shell command does, against the stack."""
    module, function, model = job.function
    config = home.parent / "config.json"
    config.write_text(json.dumps(job.config))
    code = f"import {module} as m; m.{function}(m.{model}.model_validate_json(open({str(config)!r}).read()))"
    secret = stack.s3.secret_access_key
    assert secret is not None
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "AWS_"))}
    environment |= {
        "PREFECT_HOME": str(stack.home),
        "DFLASH_HOME": str(home),
        "AWS_ENDPOINT_URL": str(stack.s3.endpoint_url),
        "AWS_ACCESS_KEY_ID": str(stack.s3.access_key_id),
        "AWS_SECRET_ACCESS_KEY": secret.get_secret_value(),
    }
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=inherited | environment, text=True, stderr=subprocess.PIPE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of a size; a second call changes it."""
    place = tmp_path / "disk"
    place.mkdir()

    def resize(size: str) -> Path:
        remount = ["-o", f"remount,size={size}"] if place.is_mount() else ["-o", f"size={size}", "-t", "tmpfs"]
        result = subprocess.run(["mount", *remount, "tmpfs", place], capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"this user can't mount a file system: {result.stderr.strip()}")
        return place / "home"

    yield resize
    if place.is_mount():
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize(("stage", "size"), [("tokenize", "600k"), ("merge", "600k"), ("train", "300k")])
def test_a_full_disk_is_named_and_with_room_the_run_goes_on(
    stack: StackConnection,
    make_job: Callable[[str], FaultJob],
    small_disk: Callable[[str], Path],
    stage: str,
    size: str,
) -> None:
    job = make_job(stage)
    home = small_disk(size)
    with run_here(stack, job, home) as process:
        _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, told
    assert "No space left on device" in told
    small_disk("2g")
    with run_here(stack, job, home) as process:
        _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    job.check()


@pytest.mark.parametrize("days", [1, -1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_clock_that_jumps_spoils_nothing(
    stack: StackConnection, make_job: Callable[[str], FaultJob], tmp_path: Path, stage: str, days: int
) -> None:
    """The store refuses requests of another day; the clock that comes back makes them good again."""
    spec = importlib.util.find_spec("libfaketime")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (library,) = Path(spec.submodule_search_locations[0]).rglob("libfaketime.so.1")
    job, home, clock = make_job(stage), tmp_path / "home" / "work", tmp_path / "clock"
    home.mkdir(parents=True)
    clock.write_text("+0d")
    faked = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock), "DONT_FAKE_MONOTONIC": "1"}
    job.is_midway(home.parent)
    with run_here(stack, job, home.parent, FAKETIME_CACHE_DURATION="1", **faked) as process:
        wait_for(lambda: process.poll() is not None or job.is_midway(home.parent), LIMIT_S)
        clock.write_text(f"{days:+d}d")
        _, told = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        assert "s3://" in told, told
        with run_here(stack, job, home.parent) as process:
            _, told = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, told
    job.check()
