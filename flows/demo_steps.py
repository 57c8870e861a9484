"""What every demo does: time its steps, put files on the store, run deployments as a person in the UI does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from dflash.config import RunModel, TokenizeOptions
from dflash.data.plan import CODE_VERSION
from dflash.data.shards import SCHEMA_VERSION
from dflash.errors import ServiceError, UsageError
from dflash.manifest import fingerprint_of, sha256_hex
from dflash.storage import open_store
from embedded.stack import StackConnection, activate, connect, up

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples" / "completions"


@dataclass(slots=True)
class Demo:
    """State of a demo: where it works, what it measured."""

    project: Path
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step under its name."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)
        self.console.print(f"[dim]{name}: {self.seconds[name]} s[/dim]")


def start_stack(demo: Demo) -> StackConnection:
    """Start what isn't running, and use its servers from this process on."""
    with demo.step("up"):
        up(demo.project, say=demo.console.print)
        stack = connect(demo.project)
        activate(stack)
    return stack


def list_examples(folder: Path = EXAMPLES) -> list[Path]:
    """The example completions, in order.

    Raises:
        UsageError: there is none, as outside a checkout.
    """
    parts = sorted(folder.glob("part-*.jsonl"))
    if not parts:
        raise UsageError(f"{folder} holds no part-*.jsonl: run the demo from a checkout of the repository.")
    return parts


def inputs_prefix(prefix: str, paths: list[Path]) -> str:
    """A prefix of its own for what is made from these files by this code.

    Objects and datasets are never overwritten: after a checkout that changed either, the old prefix would be refused.
    """
    decides = {
        "files": [[path.name, sha256_hex(path.read_bytes())] for path in paths],
        "options": TokenizeOptions().model_dump(mode="json"),
        "code_version": CODE_VERSION,
        "schema_version": SCHEMA_VERSION,
    }
    return f"{prefix}-{fingerprint_of(decides)[:12]}"


def put_files(stack: StackConnection, prefix: str, paths: list[Path]) -> str:
    """Put files under their own prefix of the bucket; those that are there already stay. Return its URI."""
    uri = f"s3://{stack.bucket}/{inputs_prefix(prefix, paths)}"
    store = open_store(uri, stack.s3)
    for path in paths:
        store.put_if_absent(path.name, path)
    return uri


def run_deployed(run: RunModel, deployment: str = "tokenize-completions/tokenize-completions") -> dict[str, Any]:
    """Run a deployment on its worker and wait, as a press on Run in the UI does.

    Raises:
        ServiceError: the flow run did not complete; its message and address.
    """
    from prefect.client.schemas.objects import FlowRun
    from prefect.deployments import run_deployment
    from prefect.settings import PREFECT_UI_URL

    flow_run = cast(
        "FlowRun",
        run_deployment(
            deployment,
            parameters={"config": run.model_dump(mode="json")},
            poll_interval=1,
        ),
    )
    state = flow_run.state
    if state is None or not state.is_completed():
        raise ServiceError(
            f"The flow run {flow_run.name} did not complete: {state.message if state else 'no state'}\n"
            f"See {PREFECT_UI_URL.value()}/runs/flow-run/{flow_run.id}"
        )
    result: dict[str, Any] = state.result(raise_on_failure=True)
    return result | {"flow_run_url": f"{PREFECT_UI_URL.value()}/runs/flow-run/{flow_run.id}"}
