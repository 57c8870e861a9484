"""Batches whose parts are gone, cut or emptied, and a batch that would become its own prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.errors import DamagedDatasetError, UsageError
from tests.generate.conftest import MakeRun, generate, prompt, write_prompts
from tests.generate.stub_server import Stub, serving


@pytest.mark.parametrize("data", [None, b"", b"all but the last line"])
def test_a_complete_batch_whose_parts_are_gone_or_cut_is_damaged(
    tmp_path: Path, make_run: MakeRun, data: bytes | None
) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, 12)
        generate(run, tmp_path / "work")
        part = tmp_path / "batch" / "part-00000.jsonl"
        lines = part.read_bytes().splitlines(keepends=True)
        part.unlink()
        if data is not None:
            part.write_bytes(b"".join(lines[:-1]) if data else data)
        stub.seen.clear()
        with pytest.raises(DamagedDatasetError, match=r"part-00000\.jsonl.* Put (it|them) back from a copy"):
            generate(run, tmp_path / "work")
    assert not stub.seen


def test_an_emptied_part_ends_no_batch_that_is_open(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, 12)
        generate(run, tmp_path / "work")
        batch = tmp_path / "batch"
        for key in ("_SUCCESS", "part-00002.jsonl"):
            (batch / key).unlink()
        part = batch / "part-00001.jsonl"
        part.write_bytes(b"")
        with pytest.raises(
            DamagedDatasetError, match=r"part-00001\.jsonl is empty, but .*_parts/part-00001\.json\. Put"
        ):
            generate(run, tmp_path / "work")
        # What the message says to do.
        part.unlink()
        (batch / "_parts" / "part-00001.json").unlink()
        assert generate(run, tmp_path / "work").num_new == 2


@pytest.mark.parametrize("batch", ["prompts", "prompts/deep/batch", "prompts/"])
def test_a_batch_in_the_folder_of_its_prompts_is_refused(tmp_path: Path, make_run: MakeRun, batch: str) -> None:
    write_prompts(tmp_path / "p.jsonl", [prompt(1)])
    (tmp_path / "prompts").mkdir()
    (tmp_path / "p.jsonl").rename(tmp_path / "prompts" / "p.jsonl")
    with serving(Stub()) as stub:
        run = make_run(stub, 1).model_copy(update={"prompts": str(tmp_path / "prompts")})
        with pytest.raises(UsageError, match="lies in the folder of the prompts"):
            generate(run.model_copy(update={"batch": f"{tmp_path}/{batch}"}), tmp_path / "work")
        assert generate(run.model_copy(update={"batch": f"{tmp_path}/prompts2"}), tmp_path / "work").num_new == 1
    assert [path.name for path in (tmp_path / "prompts").iterdir()] == ["p.jsonl"]
