"""Hand-checked cases of ids and loss mask, with the real Qwen3.6 tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.config import TokenizeOptions
from dflash.data.completions import normalise_record
from dflash.data.encoders import HuggingFaceEncoder
from dflash.data.records import Completion, Reject
from dflash.data.tokenize import TokenizedBatch, tokenize_batch, tokenize_completion
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import RecordError

CASES = Path(__file__).resolve().parents[3] / "shared" / "data" / "mask_cases.jsonl"


def _cases() -> list[dict[str, Any]]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_bytes().splitlines()]


def _reason(case: dict[str, Any]) -> str:
    return str(case["expected"].get("reason", ""))


SAMPLES = [pytest.param(case, id=case["id"]) for case in _cases() if case["expected"]["outcome"] == "sample"]
DROPS = [pytest.param(case, id=case["id"]) for case in _cases() if case["expected"]["outcome"] == "drop"]


def _record(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    record = dict(case["input"])
    record.pop("_neighbour_row", None)
    return record, record.pop("max_seq_len", 8192)


def _tokenize(case: dict[str, Any], tokenizer: TargetTokenizer, loss_on: str = "last_turn") -> TokenizedBatch:
    record, max_seq_len = _record(case)
    options = TokenizeOptions(max_seq_len=max_seq_len, loss_on=loss_on)
    completions: list[Completion] = [normalise_record(record)]
    if "_neighbour_row" in case["input"]:
        completions.append(normalise_record(case["input"]["_neighbour_row"]))
    return tokenize_batch(completions, tokenizer, options, HuggingFaceEncoder(tokenizer.backend))


def test_all_cases_are_there(shared_data: Path) -> None:
    assert (len(SAMPLES), len(DROPS)) == (33, 7)


@pytest.mark.parametrize("case", SAMPLES)
def test_sample_has_exactly_the_sampled_tokens(case: dict[str, Any], qwen36: TargetTokenizer) -> None:
    batch = _tokenize(case, qwen36)
    assert batch.rejects == []
    ids, mask = batch.rows.part(0, 1).ids, batch.rows.part(0, 1).mask
    expected = case["expected"]
    first = int(mask.argmax())
    loss_ids = ids[mask].tolist()
    decode = qwen36.backend.decode
    assert loss_ids == expected["loss_ids"]
    assert decode(loss_ids, skip_special_tokens=False) == expected["loss_text"]
    assert (len(ids), int(mask.sum()), first) == (
        expected["n_input_ids"],
        expected["n_loss"],
        expected["first_loss_index"],
    )
    assert loss_ids[-1] == expected["last_loss_id"]
    prompt = decode(ids[:first].tolist(), skip_special_tokens=False)
    assert prompt.endswith(expected["prompt_tail"])
    assert expected.get("prompt_contains", "") in prompt
    if "prompt_not_contains" in expected:
        assert expected["prompt_not_contains"] not in prompt
    if "must_not_contain" in expected:
        assert expected["must_not_contain"] not in decode(ids.tolist(), skip_special_tokens=False)
    assert not set(expected.get("loss_must_not_contain_ids", ())) & set(loss_ids)
    assert not set(expected.get("input_must_not_contain_ids", ())) & set(ids.tolist())
    assert expected.get("first_input_id", ids[0]) == ids[0]


@pytest.mark.parametrize("case", SAMPLES)
def test_public_function_gives_the_same(case: dict[str, Any], qwen36: TargetTokenizer) -> None:
    record, max_seq_len = _record(case)
    rows = _tokenize(case, qwen36).rows.part(0, 1)
    expected = {"input_ids": rows.ids.tolist(), "loss_mask": rows.mask.tolist()}
    assert tokenize_completion(record, qwen36, max_seq_len=max_seq_len) == expected


@pytest.mark.parametrize("case", [case for case in SAMPLES if "n_loss_chain" in case.values[0]["expected"]])
def test_all_turns_after_the_last_query(case: dict[str, Any], qwen36: TargetTokenizer) -> None:
    rows = _tokenize(case, qwen36, loss_on="all_turns").rows
    expected = case["expected"]
    loss_text = qwen36.backend.decode(rows.ids[rows.mask].tolist(), skip_special_tokens=False)
    assert loss_text == "".join(expected["loss_text_chain"])
    assert rows.mask.sum() == expected["n_loss_chain"]
    last_turn = _tokenize(case, qwen36).rows
    assert rows.ids.tolist() == last_turn.ids.tolist()


def _rejection(case: dict[str, Any], tokenizer: TargetTokenizer) -> RecordError | Reject:
    """By normalising the record, or by tokenizing it."""
    try:
        return _tokenize(case, tokenizer).rejects[0]
    except RecordError as error:
        return error


@pytest.mark.parametrize("case", DROPS)
def test_dropped_with_its_reason(case: dict[str, Any], qwen36: TargetTokenizer) -> None:
    record, max_seq_len = _record(case)
    code, _, detail = _reason(case).partition(": ")
    assert tokenize_completion(record, qwen36, max_seq_len=max_seq_len) is None
    found = _rejection(case, qwen36)
    assert (found.reason, detail in found.message) == (code, True)
