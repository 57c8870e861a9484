"""Prompts: rendered by the target's template, honouring each record; refused with file and line."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.tokenizer import TargetTokenizer, load_tokenizer
from dflash.errors import UsageError
from dflash.eval.coloured import render, segments
from dflash.eval.prompts import Prompt, prompts_digest, read_prompts, thinking_counts
from dflash.eval.speculate import Decoded
from tests.eval.small_run import PROMPTS, write_prompts

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> TargetTokenizer:
    return load_tokenizer(target_folder)


def read(tmp_path: Path, tokenizer: TargetTokenizer, records: Sequence[Any], **kwargs: Any) -> list[Prompt]:
    path = write_prompts(tmp_path / "prompts.jsonl", records)
    return read_prompts(str(path), tokenizer, **({"template_kwargs": {}} | kwargs))


def test_the_template_gets_what_the_record_says(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    given_prompts = [
        {"id": "plain", "messages": USER},
        {"id": "off", "messages": USER, "chat_template_kwargs": {"enable_thinking": False}},
        {"id": "answered", "messages": [*USER, {"role": "assistant", "content": "yes"}]},
        {"id": "ids", "prompt_token_ids": [1, 2, 3]},
    ]
    found = {one.id: one for one in read(tmp_path, tokenizer, given_prompts)}
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    texts = {name: tokenizer.backend.decode(list(one.ids), skip_special_tokens=False) for name, one in found.items()}
    assert texts["plain"] == start
    assert texts["off"] == f"{start}<think></think>"
    # As in training: an answer without a trace was sampled with thinking off.
    assert texts["answered"] == f"{start}<think></think>"
    assert found["ids"].ids == (1, 2, 3)
    assert thinking_counts(list(found.values())) == {"off": 2, "template default": 2}
    (on,) = read(tmp_path, tokenizer, [given_prompts[0]], template_kwargs={"enable_thinking": False})
    assert on.ids == found["off"].ids


def test_a_limit_takes_from_each_source_in_turn(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    records = [{"id": f"{source}{n}", "source": source, "messages": USER} for source in "ab" for n in range(3)]
    assert [one.id for one in read(tmp_path, tokenizer, records, limit=4)] == ["a0", "b0", "a1", "b1"]
    digests = {prompts_digest(read(tmp_path, tokenizer, records, limit=limit)) for limit in (1, 2, 6, 6)}
    assert len(digests) == 3
    folder = tmp_path / "folder"
    folder.mkdir()
    write_prompts(folder / "a.jsonl", records[:2])
    write_prompts(folder / "b.jsonl", records[2:])
    assert len(read_prompts(str(folder), tokenizer, {})) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts\.jsonl:2 is no prompt.*invalid_json"),
        ("[]", "expected an object with messages"),
        (json.dumps({"id": "a"}), "a list of at least one message"),
        (json.dumps({"messages": [{"role": "assistant", "content": "x"}]}), "a message before the assistant's"),
        (json.dumps({"messages": [{"role": "wizard", "content": "x"}]}), "unknown_role"),
        (json.dumps({"messages": USER, "chat_template_kwargs": {"messages": []}}), "rendering itself sets"),
        (json.dumps({"prompt_token_ids": [99999]}), "token ids of the target's vocabulary"),
        (json.dumps(PROMPTS[0]), "repeats the id 'a'"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, tokenizer: TargetTokenizer, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(PROMPTS[0])}\n{line}\n")
    with pytest.raises(UsageError, match=message):
        read_prompts(str(path), tokenizer, {})


def test_no_prompts_at_all_are_refused(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    with pytest.raises(UsageError, match="holds no prompts"):
        read(tmp_path, tokenizer, [])


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 4), max_size=12))
def test_segments_cover_the_answer_and_tell_who_wrote_it(
    tokenizer: TargetTokenizer, text: str, accepted: list[int]
) -> None:
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    decoded = Decoded(ids=ids, accepted=accepted)
    parts = segments(decoded, tokenizer)
    covered = min(len(ids), 1 + sum(accepted) + len(accepted))
    assert sum(part.num_tokens for part in parts) == covered
    assert sum(part.num_tokens for part in parts if part.is_draft) <= sum(accepted)
    assert not parts[0].is_draft
    assert all(one.is_draft != other.is_draft for one, other in itertools.pairwise(parts))
    if covered == len(ids):
        assert "".join(part.text for part in parts) == text


def test_drafted_tokens_are_shown_in_another_colour(tokenizer: TargetTokenizer) -> None:
    ids = tokenizer.backend.encode("abcdef", add_special_tokens=False).ids
    shown = render(Decoded(ids=ids, accepted=[2, 1]), tokenizer)
    assert shown.plain.startswith("abcdef\n\n3 of 6 tokens drafted, 2 passes")
    assert [shown.plain[span.start : span.end] for span in shown.spans if span.style == "bold green"][:2] == ["bc", "e"]


def test_compressed_prompts_are_read_and_damaged_ones_named(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in PROMPTS).encode()
    for name, data in {"a.jsonl.gz": gzip.compress(lines), "b.jsonl.zst": zstandard.compress(lines)}.items():
        (tmp_path / name).write_bytes(data)
        assert len(read_prompts(str(tmp_path / name), tokenizer, {})) == len(PROMPTS)
        (tmp_path / name).write_bytes(b"not compressed")
        with pytest.raises(UsageError, match=rf"{name}:1 can't be read"):
            read_prompts(str(tmp_path / name), tokenizer, {})


@pytest.mark.parametrize("flag", ["yes", [1], 1])
def test_thinking_is_on_or_off(tmp_path: Path, tokenizer: TargetTokenizer, flag: object) -> None:
    record = {"id": "a", "messages": USER, "chat_template_kwargs": {"enable_thinking": flag}}
    with pytest.raises(UsageError, match=r"jsonl:1 .*chat_template_kwargs\.enable_thinking: expected true or false"):
        read(tmp_path, tokenizer, [record])
