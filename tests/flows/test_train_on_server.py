"""Training on a real server: cancelled from the API, retried, and as a child of the flow that releases a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash.storage import open_store
from dflash.train.checkpoint_store import CheckpointStore
from dflash.train.curves import MetricsTail
from dflash.train.launch import run_dir_of
from tests.eval.small_run import write_prompts, write_target
from tests.flows.server import Server, wait_for
from tests.train.tiny_run import publish_rows, tiny_run

if TYPE_CHECKING:
    from embedded.stack import StackConnection

pytestmark = pytest.mark.slow

NUM_STEPS = 1200


@pytest.fixture(scope="module")
def small(stack: StackConnection, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A dataset and a target for it."""
    base = f"s3://{stack.bucket}/training"
    publish_rows(f"{base}/data", tmp_path_factory.mktemp("made"), stack.s3)
    return base, write_target(stack.project / "small-target")


def test_a_cancelled_training_saves_and_its_retry_goes_on_to_the_end(
    stack: StackConnection, small: tuple[str, Path]
) -> None:
    server, (base, target) = Server.of(stack), small
    config = tiny_run(
        f"{base}/data", target, f"{base}/run", num_epochs=10_000, max_steps=NUM_STEPS, checkpoint_every=5_000
    )
    flow_run = server.start("train-online", config)
    run_dir = run_dir_of(config["output"], stack.project / ".dflash" / "work")
    tail = MetricsTail(run_dir)
    wait_for(tail.newest, 600)
    server.cancel(flow_run)
    ended = server.wait(flow_run, 600)
    assert ended["state"]["type"] == "CANCELLED", ended["state"]

    checkpoints = CheckpointStore(open_store(f"{config['output']}/checkpoints", stack.s3), keep=3)
    (saved,) = wait_for(checkpoints.steps, 120)
    assert 0 < saved < NUM_STEPS
    server.retry(flow_run)
    wait_for(lambda: server.api.get(f"/flow_runs/{flow_run}")["run_count"] == 2, 120)
    ended = server.wait(flow_run, 600)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    assert checkpoints.steps() == [saved, NUM_STEPS]
    rows = [json.loads(line) for line in open_store(config["output"], stack.s3).read("metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    (curves,) = server.artifacts(flow_run, "training-curves")[:1]
    assert "data:image/png;base64,iVBOR" in curves["data"]


def test_a_drafter_is_trained_measured_exported_and_released(
    stack: StackConnection, small: tuple[str, Path], tmp_path: Path
) -> None:
    server, (base, target) = Server.of(stack), small
    open_store(f"{base}/prompts", stack.s3).put_if_absent(
        "heldout.jsonl", write_prompts(tmp_path / "heldout.jsonl").read_bytes()
    )
    config: dict[str, Any] = {
        "run": tiny_run(f"{base}/data", target, f"{base}/drafters", max_steps=6),
        "prompts": f"{base}/prompts/heldout.jsonl",
        "decode": {"max_new_tokens": 6},
    }
    flow_run = server.start("train-drafter", config)
    ended = server.wait(flow_run, 900)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    drafters = open_store(f"{base}/drafters", stack.s3)
    released = json.loads(drafters.read("released.json"))
    assert released["manifest"].startswith("v000001-")
    assert (released["step"], released["previous"], released["tau"] >= 1) == (6, None, True)
    keys = {info.key for info in open_store(released["export"], stack.s3).list()}
    assert {"config.json", "model.safetensors", "README.md"} <= keys
    assert server.artifacts(flow_run, "drafter")
