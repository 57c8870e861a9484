from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dflash.data.batches import LocalShards
from dflash.errors import UsageError
from dflash.eval import acceptance
from dflash.eval.acceptance import Prompt, evaluate, refuse_training_prompts
from dflash.eval.sampling import Sampling
from dflash.eval.speculate import Decoded, DecodeOptions, Speculator
from dflash.model.drafter import Drafter
from dflash.model.features import Target

PROMPTS = [Prompt("a", "math", (3, 4, 5)), Prompt("b", "code", (9,)), Prompt("c", "math", (7, 8))]


@pytest.fixture
def speculator(targets: Callable[[str], Target], random_drafter: Callable[..., Drafter]) -> Speculator:
    target = targets("llama")
    return Speculator(target, random_drafter(target))


def test_reports_by_source_and_overall(speculator: Speculator) -> None:
    seen: dict[str, Decoded] = {}
    report = evaluate(speculator, PROMPTS, DecodeOptions(9), on_prompt=lambda p, d: seen.update({p.id: d}))
    assert list(report.groups) == ["overall", "code", "math"]
    accepted = [number for decoded in seen.values() for number in decoded.accepted]
    overall = report.groups["overall"]
    assert overall.tau == report.tau == pytest.approx(sum(accepted) / len(accepted) + 1)
    assert (overall.num_prompts, overall.num_identical, overall.num_tokens) == (3, 3, 27)
    assert overall.acceptance[0] == pytest.approx(sum(number >= 1 for number in accepted) / len(accepted))
    assert sum(overall.acceptance) == pytest.approx(report.tau - 1)
    assert report.groups["math"].num_prompts == 2
    assert overall.draft_share + overall.verify_share == pytest.approx(1)
    assert overall.tokens_per_s > 0
    assert report.divergences == []
    assert json.loads(json.dumps(report.to_json()))["definition"].startswith("mean over verify rounds")


def test_a_divergence_is_reported_with_its_gap(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    real = acceptance.decode_plain

    def flipped(*args: Any) -> Decoded:
        plain = real(*args)
        plain.ids[4] += 1
        plain.gaps[4] = 0.25
        return plain

    monkeypatch.setattr(acceptance, "decode_plain", flipped)
    report = evaluate(speculator, PROMPTS[:1], DecodeOptions(9))
    assert report.groups["overall"].num_identical == 0
    (divergence,) = report.divergences
    assert (divergence.prompt_id, divergence.index, divergence.logit_gap) == ("a", 4, 0.25)
    assert divergence.plain == (divergence.speculative or 0) + 1


def test_sampling_reports_no_losslessness(speculator: Speculator) -> None:
    report = evaluate(speculator, PROMPTS[:1], DecodeOptions(5, sampling=Sampling(1.0)))
    assert report.groups["overall"].num_identical is None
    assert report.divergences == []
    without = evaluate(speculator, PROMPTS[:1], DecodeOptions(5), compare=False)
    assert without.groups["overall"].plain_tokens_per_s is None


def test_no_prompts_are_refused(speculator: Speculator) -> None:
    with pytest.raises(UsageError, match="no prompts"):
        evaluate(speculator, [], DecodeOptions(5))


def test_a_source_named_as_the_group_of_all_is_refused(speculator: Speculator) -> None:
    with pytest.raises(UsageError, match=r"1 of 4 prompts, such as 'd', have the source 'overall'.*another name"):
        evaluate(speculator, [*PROMPTS, Prompt("d", "overall", (3,))], DecodeOptions(5))


def test_prompts_that_were_trained_on_are_refused(tmp_path: Path) -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[3, 4, 50, 51, 8, 52], [6, 6, 6]], pa.list_(pa.int32())),
            "loss_mask": [[False, False, True, True, False, True], [False, True, True]],
            "sample_id": ["x", "b"],
            "source": ["", ""],
        }
    )
    path = tmp_path / "shard.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    source = LocalShards.scan([path])
    refuse_training_prompts([Prompt("new", "", (3, 4, 5)), Prompt("other", "", (3,))], source)
    with pytest.raises(UsageError, match=r"1 of 2 .*same-tokens"):
        refuse_training_prompts([Prompt("same-tokens", "", (3, 4)), Prompt("other", "", (3,))], source)
    with pytest.raises(UsageError, match=r"1 of 1 .*second-turn"):
        refuse_training_prompts([Prompt("second-turn", "", (3, 4, 50, 51, 8))], source)
    with pytest.raises(UsageError, match=r"1 of 1 .*'b'"):
        refuse_training_prompts([Prompt("b", "", (9, 9))], source)
