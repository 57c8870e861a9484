"""The GPU check's path, on a CPU in seconds: the script itself must not fail when a GPU is lent for minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_prepared_script_runs_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_check.py", "--tiny", "--device", "cpu", "--json", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "out").read_text())
    assert found["equality"]["passed"] is True
    assert found["training"]["tokens_per_s"] > 0
    assert abs(found["training"]["prediction_error"]) < 0.25
    assert set(found["training"]["parts_gb"]) >= {"target weights", "drafter activations", "optimizer"}
    for section in found:
        assert section in result.stdout
