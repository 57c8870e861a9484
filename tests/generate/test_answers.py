"""What becomes of a reply: records that our reader accepts, or the reason why there is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dflash.data.completions import normalise_record
from dflash.generate.answers import Failure, make_record
from dflash.generate.config import GenerateRun, SamplingOptions
from dflash.generate.looks import Look, look_at
from dflash.generate.prompts import Prompt
from dflash.generate.requests import OpenAIDialect, Request, SGLangDialect, make_request

QUESTION = [{"role": "user", "content": "Why?"}]


def request(thinking: bool | None = None, **fields: Any) -> Request:
    run = GenerateRun(prompts="p", batch="b", endpoints=("http://a/v1",), thinking=thinking)
    return make_request(Prompt("q", QUESTION, **fields), run, "m")


def reply(message: dict[str, Any], finish: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish, **choice}],
        "usage": {"completion_tokens": 3, "prompt_tokens": 2},
    }


def read(message: dict[str, Any], finish: Any = "stop", thinking: bool | None = None, **choice: Any) -> Any:
    sampled = OpenAIDialect().read(reply(message, finish, **choice), {})
    return make_record(request(thinking), sampled, "http://a/v1", 1)


def test_a_record_keeps_what_training_needs() -> None:
    asked = request(thinking=True, tools=[{"type": "function", "function": {"name": "f"}}], source="maths")
    given = reply({"content": "Yes.", "reasoning": "Hm.", "tool_calls": None}, token_ids=[5, 6, 2])
    record = make_record(asked, OpenAIDialect().read({**given, "prompt_token_ids": [1, 4]}, {}), "http://a/v1", 2)
    assert isinstance(record, dict)
    assert record["messages"][-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert record["sampling"]["seed"] == asked.seed
    assert "thinking_truncated" not in record
    read_back = normalise_record(record)
    assert (read_back.output_token_ids, read_back.prompt_token_ids) == ([5, 6, 2], [1, 4])
    assert (read_back.output_tokens, read_back.finish_reason, read_back.source) == (3, "stop", "maths")
    assert read_back.chat_template_kwargs == {"enable_thinking": True}
    assert read_back.tools == asked.prompt.tools
    assert record["request_hash"] == asked.hash == request(True, tools=asked.prompt.tools, source="other").hash


@pytest.mark.parametrize(
    ("message", "thinking"),
    [
        ({"content": None, "reasoning_content": "On and on"}, None),
        ({"content": "", "reasoning": "On and on"}, True),
        ({"content": "On and on"}, True),
        ({"content": "<think>\nOn and on"}, None),
    ],
)
def test_cut_thinking_is_never_an_answer(message: dict[str, Any], thinking: bool | None) -> None:
    record = read(message, "length", thinking)
    assert record["messages"][-1] == {"role": "assistant", "content": None, "reasoning_content": "On and on"}
    assert record["thinking_truncated"]
    assert normalise_record(record).messages[-1]["content"] is None


@pytest.mark.parametrize(
    ("message", "finish", "thinking", "content", "trace"),
    [
        ({"content": "Because"}, "length", False, "Because", None),
        ({"content": "Because"}, "length", None, "Because", None),
        ({"content": "Hm.\n</think>\n\nBecause"}, "length", True, "Because", "Hm."),
        ({"content": "Because", "reasoning": "Hm."}, "length", True, "Because", "Hm."),
        ({"content": "Because"}, "stop", True, "Because", None),
    ],
)
def test_cut_answers_stay_answers(
    message: dict[str, Any], finish: str, thinking: bool | None, content: str, trace: str | None
) -> None:
    record = read(message, finish, thinking)
    assert "thinking_truncated" not in record
    last = normalise_record(record).messages[-1]
    assert (last["content"], last.get("reasoning_content")) == (content, trace)


@pytest.mark.parametrize(
    ("message", "finish", "kind"),
    [
        ({"content": ""}, "stop", "empty"),
        ({"content": " \n"}, "stop", "empty"),
        ({"content": "<think>\n\n</think>\n\n"}, "stop", "empty"),
        ({"content": "\n</think>\n\n"}, "length", "empty"),
        ({"content": None, "reasoning_content": ""}, "stop", "empty"),
        ({"content": None}, "stop", "empty"),
        ({"content": "Yes"}, "abort", "aborted"),
        ({"content": "Yes"}, "content_filter", "aborted"),
        ({"content": "Yes"}, None, "bad_reply"),
        ({"content": "Yes"}, "whatever", "bad_reply"),
        ({"content": 7}, "stop", "unusable_bad_field"),
        ({"content": "Yes", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "tool_calls", None),
    ],
)
def test_no_record_without_a_response(message: dict[str, Any], finish: Any, kind: str | None) -> None:
    failure = read(message, finish, token_ids=[1, 2])
    assert isinstance(failure, Failure)
    assert failure.may_retry
    assert failure.kind == (kind or "unusable_tool_arguments_not_json")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"usage": {"completion_tokens": -1}}, "bad_reply"),
        ({"usage": {"completion_tokens": 3, "prompt_tokens": -5}}, "bad_reply"),
        ({"usage": {"prompt_tokens": "many"}}, "bad_reply"),
        ({"usage": {"completion_tokens": True}}, "bad_reply"),
        ({"usage": {"completion_tokens": 10**400}}, "bad_reply"),
        ({"usage": {"completion_tokens": 1.5}}, "bad_reply"),
        ({"usage": None}, None),
        ({"model": "other"}, "other_model"),
        ({"model": "another/M"}, None),
        ({"model": "m-2024-08-06"}, None),
        ({"model": "m-large"}, "other_model"),
        ({"model": 5}, None),
        ({"system_fingerprint": {"a": 1e999}}, None),
        ({"prompt_token_ids": [1, -1]}, "unusable_bad_field"),
        ({"prompt_token_ids": [2**31]}, "unusable_bad_field"),
    ],
)
def test_what_surrounds_a_message_is_held_to_its_meaning(changes: dict[str, Any], kind: str | None) -> None:
    record = make_record(request(), OpenAIDialect().read(reply({"content": "Yes"}) | changes, {}), "a", 1)
    if kind is None:
        assert isinstance(record, dict)
        look = msgspec.convert(look_at(record), Look)
        assert json.loads(msgspec.json.encode(record)) == record
        assert look["output_tokens"] in (3, None)
    else:
        assert isinstance(record, Failure)
        assert (record.kind, record.is_fatal) == (kind, kind == "other_model")


@pytest.mark.parametrize(
    ("message", "trace"),
    [
        ({"content": "Yes", "reasoning_content": "Hm.", "reasoning": "Hm.\n"}, "Hm."),
        ({"content": "Yes", "reasoning_content": "", "reasoning": "Hm."}, "Hm."),
        ({"content": "Yes", "thinking": "Hm."}, "Hm."),
        ({"content": "Yes", "reasoning_content": "Hm.", "reasoning": "Ah."}, None),
        ({"content": "Yes", "reasoning_content": ["Hm."]}, None),
    ],
)
def test_one_trace_by_whatever_name(message: dict[str, Any], trace: str | None) -> None:
    record = read(message)
    if trace is None:
        assert isinstance(record, Failure)
    else:
        assert normalise_record(record).messages[-1]["reasoning_content"] == trace


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ([{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1e400}'}}], "invalid_number"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "tool_arguments_not_object"),
        ([{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}], "duplicate_key"),
        ([{"function": {"name": "", "arguments": "{}"}}], "bad_field"),
        ([{"function": {"name": "f"}}], "bad_field"),
        ([{"type": "web_search", "function": {"name": "f", "arguments": "{}"}}], "bad_field"),
        ("f()", "bad_field"),
        ([{"function": {"name": "f", "arguments": {"a": 10**30}}}], None),
        ([{"function": {"name": "f", "arguments": None}}], None),
    ],
)
def test_calls_that_training_could_not_read_are_asked_again(calls: Any, kind: str | None) -> None:
    record = read({"content": None, "tool_calls": calls}, "tool_calls")
    if kind is None:
        assert json.loads(msgspec.json.encode(record))["messages"][-1]["tool_calls"] == calls
    else:
        assert isinstance(record, Failure)
        assert (record.kind, record.other_seed) == (f"unusable_{kind}", True)


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{"message": "text"}]}, [], "text", None])
def test_replies_of_another_shape_are_told_apart(broken: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        OpenAIDialect().read(broken, {})


def test_seeds_depend_on_the_id_and_change_after_an_empty_answer() -> None:
    run = GenerateRun(prompts="p", batch="b", endpoints=("http://a/v1",))
    seeds = {make_request(Prompt(str(number), QUESTION), run, "m").seed for number in range(50)}
    assert len(seeds) == 50
    first = make_request(Prompt("1", QUESTION), run, "m")
    assert first.seed == make_request(Prompt("1", QUESTION), run, "m").seed
    assert first.with_other_seed(1).seed not in (first.seed, first.with_other_seed(2).seed)
    assert first.with_other_seed(1).hash == first.hash
    none = make_request(Prompt("1", QUESTION, sampling={"seed": None}), run, "m")
    assert none.seed is None
    assert none.with_other_seed(1) is none
    assert "seed" not in OpenAIDialect().body(none)


def test_arguments_of_earlier_calls_go_as_text() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"a": "é", "b": None}}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    run = GenerateRun(prompts="p", batch="b", endpoints=("http://a/v1",), sampling=SamplingOptions(top_k=20))
    asked = make_request(Prompt("q", messages), run, "m")
    body = OpenAIDialect().body(asked)
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": "é", "b": null}'
    assert body["top_k"] == 20
    assert asked.prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "é", "b": None}


def test_the_native_api_of_sglang_gives_ids(smollm2_tokenizer_dir: Any) -> None:
    from dflash.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_tokenizer_dir, probe=False)
    dialect = SGLangDialect(tokenizer)
    asked = request(sampling={"top_k": 5, "max_tokens": 9})
    body = dialect.body(asked)
    text = tokenizer.backend.decode(body["input_ids"], skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 9,
        "top_k": 5,
        "sampling_seed": asked.seed,
    }
    assert dialect.url("http://a:1/v1") == "http://a:1/generate"
    meta = {"finish_reason": {"type": "length", "length": 2}, "completion_tokens": 2, "prompt_tokens": 8}
    record = make_record(asked, dialect.read({"text": "Be", "output_ids": [7, 8], "meta_info": meta}, body), "a", 1)
    assert isinstance(record, dict)
    assert (record["output_token_ids"], record["finish_reason"], record["output_tokens"]) == ([7, 8], "length", 2)
    assert record["prompt_token_ids"] == body["input_ids"]


@pytest.mark.parametrize(
    ("text", "content", "trace"),
    [("Hm, so", None, "Hm, so"), ("Hm.\n</think>\n\nYes.", "Hm.\n</think>\n\nYes.", None)],
)
def test_text_inside_the_trace_that_the_prompt_opened_is_no_answer(
    smollm2_tokenizer_dir: Any, text: str, content: str | None, trace: str | None
) -> None:
    from dflash.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_tokenizer_dir, probe=False)
    ids = tokenizer.backend.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False).ids
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 3, "prompt_tokens": len(ids)}
    sampled = SGLangDialect(tokenizer).read({"text": text, "output_ids": [7], "meta_info": meta}, {"input_ids": ids})
    record = make_record(request(), sampled, "a", 1)
    assert isinstance(record, dict)
    assert record["messages"][-1]["content"] == content
    assert record["messages"][-1].get("reasoning_content") == trace
    assert "thinking_truncated" not in record
