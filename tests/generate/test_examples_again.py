"""The committed completions can be made again by `dflash serve` and `dflash generate`, as their README says."""

from __future__ import annotations

import json
from pathlib import Path

from dflash.generate.config import GenerateRun, SamplingOptions
from embedded.smollm2 import ensure_smollm2
from tests.generate.conftest import generate, records
from tests.serving.server_process import serving

MODEL = Path(__file__).parents[2] / ".dflash" / "models" / "smollm2"
NUM_RECORDS = 6  # those with the shortest answers: some fifty passes of the real small target


def test_the_real_small_target_gives_the_committed_answers(example_completions: Path, tmp_path: Path) -> None:
    lines = [line for path in example_completions.glob("part-*.jsonl") for line in path.read_text("utf-8").splitlines()]
    shortest = sorted(map(json.loads, lines), key=lambda one: (one["output_tokens"], one["id"]))[:NUM_RECORDS]
    expected = {one["id"]: one for one in shortest}
    asked = (example_completions / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(line for line in asked if json.loads(line)["id"] in expected))
    with serving(ensure_smollm2(MODEL)) as (url, _):
        run = GenerateRun(
            prompts=str(tmp_path / "prompts.jsonl"),
            batch=str(tmp_path / "again"),
            endpoints=(url,),
            sampling=SamplingOptions(temperature=0, max_tokens=128, seed=None),
        )
        assert generate(run, tmp_path / "work").num_records == NUM_RECORDS
    for record in records(tmp_path / "again"):
        kept = expected.pop(record["id"])
        same = ("messages", "source", "finish_reason", "output_tokens", "output_token_ids", "prompt_token_ids")
        assert {name: record[name] for name in same} == {name: kept[name] for name in same}
    assert not expected
