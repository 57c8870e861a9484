"""Normalising records: each alias, each refusal, and that nothing else changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import messages
from dflash.data.completions import Completion, Reason, normalise_record, read_completions
from dflash.errors import RecordError

USER = {"role": "user", "content": "q"}
RENDERING = {"template_error", "no_loss_tokens_within_max_seq_len", "too_few_loss_tokens"}


def normalise(response: dict[str, Any], **fields: Any) -> Completion:
    return normalise_record({"messages": [USER, {"role": "assistant", **response}], **fields})


def answer(response: dict[str, Any], **fields: Any) -> tuple[str | None, str | None]:
    """Content and trace of the normalised response; the trace is None without the key."""
    message = normalise(response, **fields).messages[-1]
    assert set(message) <= {"role", "content", "reasoning_content", "tool_calls"}
    return message["content"], message.get("reasoning_content")


def reason(record: Any) -> tuple[str, str]:
    with pytest.raises(RecordError) as caught:
        normalise_record(record)
    assert caught.value.reason in set(Reason)
    return caught.value.reason, caught.value.message


def reason_of_response(**response: Any) -> str:
    return reason({"messages": [USER, {"role": "assistant", **response}]})[0]


def test_hand_checked_cases(shared_data: Path) -> None:
    for row in (shared_data / "mask_cases.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(row)
        expected = case["expected"].get("reason", "").split(":")[0]
        if expected and expected not in RENDERING:
            assert reason(case["input"])[0] == expected, case["id"]
        else:
            assert normalise_record(case["input"]).messages, case["id"]


def test_real_conversations_are_read_as_they_are(shared_data: Path) -> None:
    for path in sorted((shared_data / "reasoning_messages").glob("*.jsonl")):
        records = [json.loads(row) for row in path.read_bytes().split(b"\n") if row]
        for original, entry in zip(records, read_completions(path, file=path.name), strict=True):
            assert isinstance(entry, Completion)
            assert entry.id == original["id"]
            assert json.dumps(entry.tools) == json.dumps(original.get("tools") or None)
            for before, after in zip(original["messages"], entry.messages, strict=True):
                assert after["content"] == before.get("content")
                assert after.get("reasoning_content") == before.get("reasoning_content")
                for call_before, call in zip(before.get("tool_calls", []), after.get("tool_calls", []), strict=True):
                    arguments = json.loads(call_before["function"]["arguments"])
                    assert json.dumps(call["function"]["arguments"]) == json.dumps(arguments)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_a_trace_under_any_of_its_names(field: str) -> None:
    assert answer({"content": "a", field: " r\n"}) == ("a", " r\n")
    assert answer({"content": None, field: "r"}) == (None, "r")
    assert answer({field: "r"}) == (None, "r")
    assert answer({"content": "a", field: ""}) == ("a", "")
    assert answer({"content": "a", field: None}) == ("a", None)
    assert reason_of_response(content="a", **{field: {"effort": "high"}}) == Reason.BAD_FIELD


def test_traces_under_several_names_agree_or_are_refused() -> None:
    assert answer({"content": "a", "reasoning": "r", "reasoning_content": "r"}) == ("a", "r")
    assert answer({"content": "a", "reasoning": "r\n", "thinking": "r"}) == ("a", "r\n")
    assert answer({"content": "a", "reasoning": "r", "reasoning_content": "", "thinking": None}) == ("a", "r")
    assert answer({"content": "a", "reasoning": " ", "reasoning_content": "r"}) == ("a", "r")
    assert reason_of_response(content="a", reasoning="r", thinking="s") == Reason.CONFLICTING_REASONING


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nr1 r2\n</think>\n\nyes", ("yes", "r1 r2")),
        ("\n <think>r</think>yes \n", ("yes \n", "r")),
        ("<think>\n\n</think>\n\nyes", ("yes", "")),
        ("two.\n</think>\n\nfour", ("four", "two.")),
        ("</think>\n\nfour", ("four", "")),
        ("<think>\nr\n</think>\n\nuse the </think> tag", ("use the </think> tag", "r")),
        ("<think>\nr <think> s\n</think>\n a", (" a", "r <think> s")),
        ("<think>\ncut off", ("", "cut off")),
        ("<think>\n  spaces stay  \n</think>\n\n  here  ", ("  here  ", "  spaces stay  ")),
        ("Write <think> and </think> around it", ("Write <think> and </think> around it", "")),
        ("Write <think> first", ("Write <think> first", None)),
        ("yes", ("yes", None)),
    ],
)
def test_an_inline_trace(content: str, expected: tuple[str, str | None]) -> None:
    assert answer({"content": content}) == expected
    assert (
        answer({"content": [{"type": "text", "text": content[:5]}, {"type": "text", "text": content[5:]}]}) == expected
    )


def test_an_inline_trace_beside_the_field() -> None:
    assert answer({"content": "<think>\nr\n</think>\n\na", "reasoning_content": "r"}) == ("a", "r")
    assert answer({"content": "r\n</think>\n\na", "reasoning": "r\n"}) == ("a", "r\n")
    assert answer({"content": "<think>\n\n</think>\n\na", "reasoning_content": "r"}) == ("a", "r")
    assert answer({"content": "<think>\nr\n</think>\n\na", "reasoning_content": ""}) == ("a", "r")
    literal = "close it with </think> then"
    assert answer({"content": literal, "reasoning_content": "r"}) == (literal, "r")
    assert reason_of_response(content="<think>\ns\n</think>a", thinking="r") == Reason.CONFLICTING_REASONING


def test_a_closing_tag_is_text_when_the_prompt_closed_the_block() -> None:
    literal = "close it with </think> then"
    assert answer({"content": literal}, chat_template_kwargs={"enable_thinking": False}) == (literal, "")
    assert answer({"content": literal}, chat_template_kwargs={"enable_thinking": True}) == (" then", "close it with ")
    history = [USER, {"role": "assistant", "content": "r</think>a"}, USER, {"role": "assistant", "content": "b"}]
    record = {"messages": history, "chat_template_kwargs": {"enable_thinking": False}}
    assert normalise_record(record).messages[1]["reasoning_content"] == "r"


def test_conversations_with_other_names() -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "<think>r</think>c"), ("observation", "o"), ("gpt", "a")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "id": 7}
    completion = normalise_record(record, file="f", line=3)
    assert [message["role"] for message in completion.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert completion.messages[2] == {"role": "assistant", "content": "c", "reasoning_content": "r"}
    assert completion.sample_id == "7"


@pytest.mark.parametrize("role", ["moderator", "Assistant", "function_call", "", "assistant "])
def test_a_role_is_never_guessed(role: str) -> None:
    code, message = reason({"messages": [USER, {"role": role, "content": "a"}]})
    assert code == Reason.UNKNOWN_ROLE
    assert "messages[1]" in message
    assert repr(role) in message


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def called(**call_fields: Any) -> dict[str, Any]:
    (only,) = normalise({"content": None, "tool_calls": [call_fields]}).messages[-1]["tool_calls"]
    return dict(only)


def test_tool_calls_in_every_form() -> None:
    arguments = {"z": 1, "a": {"k": None, "b": [1.0, "é<'"]}, "m": True}
    text = json.dumps(arguments)
    for given_arguments in (arguments, text):
        assert called(**call(given_arguments)) == call(arguments)
        flat = called(name="f", arguments=given_arguments)
        assert flat == {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert json.dumps(flat["function"]["arguments"]) == text  # the order of the keys too
    assert called(**call(None)) == call({})
    assert called(**call("{}")) == call({})
    assert "tool_calls" not in normalise({"content": "a", "tool_calls": []}).messages[-1]
    assert "tool_calls" not in normalise({"content": "a", "tool_calls": None}).messages[-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 3', Reason.TOOL_ARGUMENTS_NOT_JSON),
        ("", Reason.TOOL_ARGUMENTS_NOT_JSON),
        ('{"a": NaN}', Reason.TOOL_ARGUMENTS_NOT_JSON),
        ("[1]", Reason.TOOL_ARGUMENTS_NOT_OBJECT),
        ('"{}"', Reason.TOOL_ARGUMENTS_NOT_OBJECT),
        ("null", Reason.TOOL_ARGUMENTS_NOT_OBJECT),
        ([1], Reason.TOOL_ARGUMENTS_NOT_OBJECT),
        (3, Reason.TOOL_ARGUMENTS_NOT_OBJECT),
        ('{"a": 1, "a": 2}', Reason.DUPLICATE_KEY),
        ('{"a": "\\ud83d"}', Reason.INVALID_UNICODE),
        ('{"a": 1e999}', Reason.INVALID_NUMBER),
        ({"a": float("inf")}, Reason.INVALID_NUMBER),
    ],
)
def test_arguments_that_are_no_object(arguments: Any, expected: Reason) -> None:
    assert reason_of_response(tool_calls=[call(arguments)]) == expected


@pytest.mark.parametrize(
    "bad",
    [
        "f()",
        {"name": "f"},
        {"arguments": {}},
        {"name": "", "arguments": {}},
        {"function": "f", "arguments": {}},
        {"type": "retrieval", "name": "f", "arguments": {}},
        {"id": 1, "name": "f", "arguments": {}},
    ],
)
def test_tool_calls_of_no_known_form(bad: Any) -> None:
    assert reason_of_response(tool_calls=[bad]) == Reason.BAD_FIELD


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "a ", "image_url": None}, {"text": "b"}, {"type": "input_text", "text": "c"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}
    user, response = normalise_record(record).messages
    assert user["content"] == [{"type": "text", "text": text} for text in ("a ", "b", "c")]
    assert response["content"] == "a bc"
    for part in ({"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "a", "image": "x"}):
        assert reason_of_response(content=[part]) == Reason.NON_TEXT_PART
    for other in ("a", {"type": "text"}, {"type": "text", "text": 1}):
        assert reason_of_response(content=[other]) == Reason.BAD_FIELD


texts = st.one_of(
    st.sampled_from(["", " ", "a", "<think>", "</think>b", "<think>\na\n</think>\n\nb", "<b>"]), st.text(max_size=4)
)
values = st.one_of(texts, st.none(), st.integers(), st.lists(texts, max_size=1))
fields = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "human", "x"]), values)},
    optional={"content": values, "reasoning_content": values, "value": values, "name": values, "reasoning": values},
)


@settings(max_examples=500, deadline=None)
@given(st.one_of(fields, values), st.booleans())
def test_plain_messages_are_normalised_as_all_are(message: Any, thinking_off: bool) -> None:
    def outcome() -> Any:
        try:
            return messages.normalise_message(copy.deepcopy(message), 0, thinking_off=thinking_off)
        except RecordError as error:
            return error.reason, error.message

    found = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_plain", lambda _: None)
        expected = outcome()
    assert (found, list(found)) == (expected, list(expected)), "equal, in the same order: templates may print fields"


def test_the_last_message_must_be_a_response() -> None:
    assert reason({"messages": []})[0] == Reason.NO_ASSISTANT_RESPONSE
    code, message = reason({"messages": [{"role": "assistant", "content": "a"}, USER]})
    assert code == Reason.NO_ASSISTANT_RESPONSE
    assert "role user" in message


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"content": None},
        {"content": " \n"},
        {"content": "", "reasoning": " "},
        {"content": "\x1c\u2003\u3000", "reasoning_content": "\x85"},
    ],
)
def test_an_empty_response(response: dict[str, Any]) -> None:
    assert reason_of_response(**response) == Reason.EMPTY_RESPONSE
    assert normalise(response, output_token_ids=[248046]).output_token_ids == [248046]
    history = [USER, {"role": "assistant", **response}, USER, {"role": "assistant", "content": "a"}]
    assert normalise_record({"messages": history}).messages[-1]["content"] == "a"


def test_other_fields() -> None:
    full = normalise(
        {"content": "a", "name": "bot", "weight": 1, "refusal": None},
        id="r",
        finish_reason="eos_token",
        output_tokens=0,
        chat_template_kwargs={"enable_thinking": None},
        prompt_token_ids=[0, 2**31 - 1],
        output_token_ids=[],
        source="gsm8k",
        model="m",
        anything={"else": []},
    )
    assert full.messages[-1] == {"role": "assistant", "content": "a", "name": "bot"}
    assert (full.id, full.finish_reason, full.output_tokens, full.source, full.model) == ("r", "stop", 0, "gsm8k", "m")
    assert full.chat_template_kwargs == {"enable_thinking": None}
    assert (full.prompt_token_ids, full.output_token_ids) == ([0, 2**31 - 1], None)
    empty = normalise({"content": "a"}, id="", finish_reason="", source="", tools=[], chat_template_kwargs=None)
    assert (empty.id, empty.finish_reason, empty.source, empty.tools) == (None, None, None, None)
    assert empty.chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("meaning", "spellings"),
    [
        ("stop", ["stop", "STOP", "stop_sequence", "eos", "eos_token", "end_turn"]),
        ("length", ["length", "LENGTH", "max_tokens", "max_output_tokens", "model_context_window_exceeded"]),
        ("length", ["pause_turn", "repetition"]),
        ("tool_calls", ["tool_calls", "function_call", "tool_use", "Tool_Calls"]),
    ],
)
def test_finish_reasons_of_all_servers_have_one_of_three_meanings(meaning: str, spellings: list[str]) -> None:
    for spelling in spellings:
        assert normalise({"content": "a"}, finish_reason=spelling).finish_reason == meaning


@pytest.mark.parametrize("spelling", ["abort", "Abort", "error", "cancelled", "content_filter", "refusal"])
def test_aborted_responses_are_not_used(spelling: str) -> None:
    for content in ("half an ans", ""):  # the reason is more telling than that nothing came
        code, message = reason(
            {"messages": [USER, {"role": "assistant", "content": content}], "finish_reason": spelling}
        )
        assert code == Reason.ABORTED_RESPONSE
        assert repr(spelling) in message


@pytest.mark.parametrize("spelling", ["matched", "stop ", "null", "x" * 1000])
def test_a_finish_reason_is_never_guessed(spelling: str) -> None:
    code, message = reason({"messages": [USER, {"role": "assistant", "content": "a"}], "finish_reason": spelling})
    assert code == Reason.BAD_FIELD
    assert "finish_reason: expected one of abort, aborted, cancelled, content_filter, end_turn, eos" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"id": True},
        {"id": 1.5},
        {"id": ["a"]},
        {"finish_reason": 1},
        {"finish_reason": {"type": "stop"}},
        {"output_tokens": "5"},
        {"output_tokens": -1},
        {"output_tokens": True},
        {"output_tokens": 5.0},
        {"chat_template_kwargs": "{}"},
        {"chat_template_kwargs": []},
        {"prompt_token_ids": "1 2"},
        {"prompt_token_ids": 0},
        {"prompt_token_ids": {}},
        {"output_token_ids": [1, True]},
        {"output_token_ids": [1, 2.0]},
        {"output_token_ids": [1, -1]},
        {"output_token_ids": [2**31]},
        {"output_token_ids": [2**80]},
        {"output_token_ids": [[1]]},
        {"source": 1},
        {"model": {}},
        {"tools": {}},
        {"tools": "[]"},
        {"tools": ["f"]},
        {"conversations": []},
    ],
)
def test_fields_of_another_type(fields: dict[str, Any]) -> None:
    code, message = reason({"messages": [USER, {"role": "assistant", "content": "a"}], **fields})
    assert code == Reason.BAD_FIELD
    assert next(iter(fields)) in message
    assert "expected" in message
    assert "found" in message


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "text",
        {"role": "user"},
        ["text"],
        [{"content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "user", "from": "gpt", "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "text": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {"text": "a"}}],
        [{"role": "user", "content": "a", "value": "b"}],
        [{"role": "tool", "content": "a", "tool_call_id": 1}],
        [{"role": "assistant", "content": "a", "tool_calls": {}}],
        [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
    ],
)
def test_messages_of_another_type(messages: Any) -> None:
    assert reason({"messages": messages})[0] == Reason.BAD_FIELD


def test_a_mapping_from_python_is_held_to_the_rules_of_a_file() -> None:
    good = {"messages": [USER, {"role": "assistant", "content": "a"}]}
    nested: Any = 0
    for _ in range(300):
        nested = [nested]
    assert reason({**good, "extra": nested})[0] == Reason.TOO_DEEP
    assert reason({**good, "extra": float("nan")})[0] == Reason.INVALID_NUMBER
    assert reason({**good, "extra": {1: 2}})[0] == Reason.BAD_FIELD
    assert reason({**good, "extra": b"bytes"})[0] == Reason.BAD_FIELD
    assert reason({**good, "tools": [{"\ud83d": 1}]})[0] == Reason.INVALID_UNICODE


def test_a_message_about_a_huge_value_is_short() -> None:
    _, message = reason({"messages": "x" * 1_000_000})
    assert len(message) < 300
    _, message = reason({"messages": [{"role": "assistant", "content": "a"}], "output_token_ids": ["x" * 1000] * 1000})
    assert len(message) < 800


def test_every_reason_is_a_plain_code() -> None:
    codes = [reason.value for reason in Reason]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").replace("8", "").isalpha() for code in codes)
    assert set(Reason) >= RENDERING


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**33)
    | st.floats()
    | st.sampled_from(["", "a", "user", "assistant", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "reasoning", "tool_calls", "function", "name", "arguments", "type", "text"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
FIELDS = ["messages", "conversations", "tools", "id", "output_tokens", "chat_template_kwargs", "output_token_ids"]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=5), ANYTHING)
def test_any_value_is_normalised_or_refused_and_left_alone(fields: dict[str, Any], last: Any) -> None:
    record = {"messages": [USER, last], **fields}
    before = copy.deepcopy(record)
    try:
        outcome = normalise_record(record).messages[-1]["role"]
    except RecordError as error:
        outcome = error.reason
    assert outcome in {"assistant", *Reason}
    assert repr(record) == repr(before)


@settings(max_examples=100, deadline=None)
@given(st.text().filter(lambda text: "think>" not in text), st.text(), st.booleans())
def test_text_without_tags_is_kept_to_the_letter(content: str, trace: str, with_trace: bool) -> None:
    response = {"content": content, **({"reasoning": trace} if with_trace else {})}
    if not (content + (trace if with_trace else "")).strip():
        assert reason_of_response(**response) == Reason.EMPTY_RESPONSE
        return
    once = normalise(response).messages
    assert once[-1]["content"] == content
    assert once[-1].get("reasoning_content") == (trace if with_trace else None)
    assert normalise_record({"messages": once}).messages == once
