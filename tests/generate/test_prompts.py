from __future__ import annotations

import datetime as dt
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from dflash.generate.prompt_source import PromptSource, open_prompts
from dflash.generate.prompts import Prompt

MESSAGES = [{"role": "user", "content": "hi"}]


def opened(folder: Path, *lines: Any, name: str = "prompts.jsonl", **options: Any) -> list[Prompt]:
    path = folder / name
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    source = open_prompts(str(path), folder, None, **options)
    source.check()
    return list(source)


def test_fields_are_read_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
    record = {
        "id": 7,
        "messages": MESSAGES,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "source": "maths",
        "sampling": {"max_tokens": 5},
        "other": 1,
    }
    (found,) = opened(tmp_path, record, "", name="p.jsonl.gz")
    assert (found.id, found.messages, found.tools, found.source) == ("7", MESSAGES, tools, "maths")
    assert (found.chat_template_kwargs, found.sampling) == ({"enable_thinking": False}, {"max_tokens": 5})


def test_prompts_without_ids_are_named_by_content_and_repeats_stay(tmp_path: Path) -> None:
    first = [one.id for one in opened(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})]
    again = [one.id for one in opened(tmp_path, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"})]
    assert len(set(first)) == 3
    assert sorted(first) == sorted(again)
    assert first[2] == f"{first[0]}#2"


def test_one_id_for_two_prompts_is_refused_by_name(tmp_path: Path) -> None:
    lines = [{"id": "a", "messages": MESSAGES}, {"id": "b", "messages": MESSAGES}, {"id": "a", "messages": MESSAGES}]
    with pytest.raises(UsageError, match=r"(?s)1 ids belong to more than one.*'a': prompts 1, 3"):
        opened(tmp_path, *lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "invalid_json"),
        ('{"id": "a", "id": "b"}', "duplicate_key"),
        ([1], "not_an_object"),
        ({"id": "a"}, "messages: expected a list"),
        ({"id": "a", "messages": []}, "messages: expected a list"),
        ({"id": "a", "messages": [{"role": "king", "content": "x"}]}, "unknown_role"),
        ({"id": "a", "messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "isn't the assistant's"),
        ({"id": "", "messages": MESSAGES}, "id: expected"),
        ({"id": "a", "messages": MESSAGES, "tools": {}}, "tools: expected"),
        ({"id": "a", "messages": MESSAGES, "sampling": {"best_of": 2}}, "sampling: expected only"),
        ({"id": "a", "messages": MESSAGES, "sampling": {"temperature": -1}}, "values in range"),
        ({"id": "a", "messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "rendering itself sets"),
        ({"id": "a", "messages": MESSAGES, "source": 5}, "source: expected"),
        ('{"id": "a", "prompt": "x", "tools": [{"function": {"maximum": 1e999}}]}', "invalid_number: tools"),
        ('{"id": "a", "prompt": "x", "chat_template_kwargs": {"a": -1e999}}', "invalid_number: chat_template_kwargs"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x", "weight": 1e999}]}', "invalid_number: messages"),
        ('{"id": "a", "prompt": "\\ud83d"}', "invalid_unicode"),
        ({"id": "a" * 513, "messages": MESSAGES}, "id: expected"),
        ({"id": 10**600, "messages": MESSAGES}, "id: expected"),
        ({"id": "a", "messages": MESSAGES, "sampling": {"max_tokens": "5"}}, "valid integer"),
        ({"id": "a", "messages": MESSAGES, "sampling": {"max_tokens": True}}, "valid integer"),
        ({"id": "a", "messages": [*MESSAGES, {"role": "tool"}]}, "messages[1]"),
        ({"id": "a", "messages": MESSAGES, "tools": [1]}, "tools: expected"),
    ],
)
def test_bad_lines_are_refused_by_place(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match=r"prompts.jsonl:2: ") as error:
        opened(tmp_path, {"id": "ok", "messages": MESSAGES}, line)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "at": dt.date(2026, 1, 1)}, "found a date"),
        ({"prompt": "x", "raw": b"a"}, "found a bytes"),
        ({"prompt": "x", "score": float("nan")}, "invalid_number"),
        ({"prompt": "\ud83d"}, "invalid_unicode"),
        ({"prompt": None}, "messages: expected a list"),
    ],
)
def test_rows_of_a_dataset_are_held_to_what_a_request_can_hold(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"datasets:a\[1\]: ") as error:
        PromptSource("datasets:a", rows=[{"prompt": "good"}, row]).check()
    assert message in str(error.value)


def test_a_torn_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20])
    with pytest.raises(UsageError, match=r"lines of .* hold no prompt"):
        open_prompts(str(path), tmp_path, None).check()


def test_answers_are_stripped_when_asked_for(tmp_path: Path) -> None:
    line = {"id": "a", "messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}
    assert opened(tmp_path, line, strip_answers=True)[0].messages == MESSAGES


def test_the_lists_of_a_batch_are_no_more_prompts_of_its_folder(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}) + "\n"
    for name in ("part-00000.jsonl", "more/part-00001.jsonl", "_failures/run-00000.ndjson", "_prompts.ndjson"):
        path = tmp_path / "batch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line.replace('"a"', '"b"') if name.startswith("more") else line)
    source = open_prompts(str(tmp_path / "batch"), tmp_path, None, strip_answers=True)
    source.check()
    assert [one.id for one in source] == ["b", "a"]
    alone = open_prompts(str(tmp_path / "batch" / "_failures" / "run-00000.ndjson"), tmp_path, None, strip_answers=True)
    assert [one.id for one in alone] == ["a"]


def test_nothing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no prompts"):
        opened(tmp_path, "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="No prompts under"):
        open_prompts(str(tmp_path / "empty"), tmp_path, None)
    with pytest.raises(UsageError, match="can't be loaded"):
        open_prompts("datasets:", tmp_path, None)


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"prompt_id": "x", "messages": MESSAGES}) + "\n")
    source = open_prompts(f"datasets:{folder}", tmp_path, None)
    assert [(one.id, one.messages) for one in source] == [("x", MESSAGES)]
