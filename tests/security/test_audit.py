"""The dependency audit: what stops a build, what doesn't, and a service that isn't there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import load_script

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return load_script(REPOSITORY / "docker" / "audit.py")


def answer(*fixes: list[str]) -> dict[str, Any]:
    advisories = [{"id": f"CVE-{number}", "fix_versions": versions} for number, versions in enumerate(fixes)]
    return {"dependencies": [{"name": "a", "version": "1", "vulns": advisories}, {"name": "b", "skip_reason": "x"}]}


@pytest.mark.parametrize(("fixes", "code"), [([], 0), ([[]], 0), ([["2"]], 1), ([[], ["2", "3"]], 1)])
def test_what_a_release_mends_stops_the_build(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], fixes: list[list[str]], code: int
) -> None:
    assert audit.judge(answer(*fixes)) == code
    printed = capsys.readouterr().out
    assert f"1 packages audited, {len(fixes)} advisories" in printed
    assert ("mended in" in printed) == bool(code)


@pytest.mark.parametrize("told", [None, {"dependencies": [{"name": "requests", "skip_reason": "not found"}]}])
def test_a_service_that_knows_nothing_is_a_skip_with_its_reason(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(audit, "ask", lambda *_: told)
    assert audit.main(["--limit-s", "1"]) == 0
    assert "audit skipped: the advisory service does not answer" in capsys.readouterr().out


def test_a_service_that_is_slow_is_left_after_the_limit(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(audit.subprocess, "run", wait)
    assert audit.ask([], 0.0) is None


def test_the_list_of_components_names_what_is_pinned(tmp_path: Path) -> None:
    tools = REPOSITORY / ".venv-audit" / "bin" / "python"
    if not tools.exists():
        pytest.skip("the environment with the tools isn't there: make audit")
    sbom = tmp_path / "new" / "sbom.json"
    program = str(REPOSITORY / "docker" / "audit.py")
    command = [str(tools), program, "--of", sys.executable, "--limit-s", "0", "--sbom", str(sbom)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    components = {item["name"].lower(): item["version"] for item in json.loads(sbom.read_text())["components"]}
    pinned = dict(
        re.findall(r"^(prefect|pyarrow|obstore)==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert len(pinned) == 3
    assert pinned.items() <= components.items()
