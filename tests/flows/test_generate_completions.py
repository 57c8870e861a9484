"""The flows on a real Prefect server: artifacts, the event, a batch that the refresh would take."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dflash.generate.config import GenerateRun, RegenerateRun, SamplingOptions
from tests.generate.conftest import prompt, write_prompts
from tests.generate.stub_server import Stub, answer, serving

pytestmark = pytest.mark.usefixtures("prefect_server", "home")


def cut(request: dict[str, Any]) -> dict[str, Any]:
    """Cuts short requests."""
    return answer(request, finish_reason="length" if request["max_tokens"] < 50 else "stop")


def test_a_batch_its_event_and_its_second_chance(tmp_path: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    from flows.generate_completions import generate_completions, regenerate_completions

    path = write_prompts(tmp_path / "prompts.jsonl", [prompt(number) for number in range(12)])
    with serving(Stub(answer=cut)) as stub:
        run = GenerateRun(
            prompts=str(path),
            batch=str(tmp_path / "batches" / "first"),
            endpoints=(stub.url,),
            part_records=5,
            sampling=SamplingOptions(max_tokens=20),
        )
        result = generate_completions(run)
        assert (result["complete"], result["records"], result["failed"]) == (True, 12, 0)
        again = generate_completions(run)
        assert (again["complete"], again["new"]) == (True, 0)
        fresh = run.model_copy(update={"batch": str(tmp_path / "batches" / "second")})
        redone = regenerate_completions(RegenerateRun(source=run.batch, generate=fresh))
        assert (redone["found"], redone["complete"], redone["records"]) == ({"length": 12}, True, 12)
        assert {body["max_tokens"] for body in stub.bodies[-12:]} == {80}
    report = json.loads((tmp_path / "batches" / "first" / "_report.json").read_text())
    assert (report["num_records"], report["finish_reasons"]) == (12, {"length": 12})
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["generation-report", "generation-progress"]))
        artifacts = client.read_artifacts(artifact_filter=wanted)
        assert {"markdown", "progress"} == {artifact.type for artifact in artifacts}
        assert any("12/12 done" in str(artifact.description) for artifact in artifacts)
        told = _completed(client)
    assert told["generation.batch.first"] == {"batch": run.batch, "records": 12, "failed": 0}
    assert told["generation.batch.second"] == {"batch": fresh.batch, "records": 12, "failed": 0}


def _completed(client: Any) -> dict[str, Any]:
    """Payloads of the events that reached the server, by resource."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        wanted = {"filter": {"event": {"name": ["generation.batch.completed"]}}}
        events = client._client.post("/events/filter", json=wanted).json()["events"]
        told = {event["resource"]["prefect.resource.id"]: event["payload"] for event in events}
        if len(told) >= 2:
            return told
        time.sleep(0.5)
    return {}


def test_the_command_prints_one_object_and_fails_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash.errors import DatasetError, UsageError
    from flows.cli_generate import generate_command, regenerate_command, spot_check_command

    path = write_prompts(tmp_path / "prompts.jsonl", [prompt(number) for number in range(6)])
    batch = str(tmp_path / "batch")

    def abort(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if "question 2" in str(request["messages"]) else "stop")

    with serving(Stub(answer=abort)) as stub:
        settings = ["max_attempts=1", "thinking=false"]
        with pytest.raises(DatasetError, match=r"1 of 6 prompts failed.*--only-failed"):
            generate_command(None, settings, str(path), [stub.url], batch)
        assert stub.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
        stub.answer = answer
        capsys.readouterr()
        generate_command(None, settings, str(path), [stub.url], batch, only_failed=True, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["complete"], printed["records"], printed["new"]) == (True, 6, 1)
    with pytest.raises(UsageError, match="No parts of a batch in"):
        spot_check_command(str(tmp_path / "nothing"), as_json=True)
    spot_check_command(batch, as_json=True)
    assert json.loads(capsys.readouterr().out)["num_records"] == 6
    regenerate_command(None, ["few_tokens=10"], batch, [stub.url], str(tmp_path / "new"), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["looked_at"], printed["found"], printed["batch"]) == (6, {}, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
