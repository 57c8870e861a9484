"""Rendering equals transformers' own, and templates of any kind split into prompt and sampled text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.chat import ChatTemplate, template_messages
from dflash.data.completions import normalise_record
from dflash.data.control_tokens import ControlTokens
from dflash.data.records import Completion
from dflash.data.tokenizer import TargetTokenizer
from dflash.data.turns import Conversation, Turn
from dflash.errors import RecordError, TokenizerError

USER = {"role": "user", "content": "q"}
CONTROLS = ControlTokens({"<|im_start|>": 1, "<|im_end|>": 2, "<eos>": 3})
HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
FOOTER = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"


def _conversations(shared_data: Path) -> list[Completion]:
    files = sorted((shared_data / "reasoning_messages").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    return [normalise_record(json.loads(line)) for line in lines]


def _turn(source: str, answer: dict[str, Any], *, ended: bool = True, kwargs: dict[str, Any] | None = None) -> Turn:
    messages = template_messages([USER, {"role": "assistant", **answer}])
    return Conversation(ChatTemplate(source, {}), CONTROLS, messages, None, kwargs or {}).turn(1, ended=ended)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    shared_data: Path, qwen36: TargetTokenizer, qwen36_dir: Path, *, add_generation_prompt: bool
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(qwen36_dir)
    for number, record in enumerate(_conversations(shared_data)):
        kwargs: dict[str, Any] = [{}, {"enable_thinking": False}, {"preserve_thinking": True}][number % 3]
        expected = tokenizer.apply_chat_template(
            record.messages,
            tools=record.tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
        found = qwen36.template.render(
            template_messages(record.messages),
            record.tools,
            kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        assert found == expected


def test_renders_special_tokens(llama3_like: TargetTokenizer, llama3_like_tokenizer: PreTrainedTokenizerFast) -> None:
    expected = llama3_like_tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert llama3_like.template.render([USER], None, {}, add_generation_prompt=True) == expected
    assert expected.startswith("<|begin_of_text|>")


def test_tool_arguments_are_not_escaped() -> None:
    template = ChatTemplate("{{ messages[0].value | tojson }}", {})
    rendered = template.render([{"value": {"k": "é<b>'&"}}], None, {}, add_generation_prompt=False)
    assert rendered == '{"k": "é<b>\'&"}'


def test_clock_stands_still() -> None:
    template = ChatTemplate("{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}", {})
    assert template.render([USER], None, {}, add_generation_prompt=True) == "2025-01-01"
    assert template.reads_clock
    assert template.render([USER], None, {"date_string": "x"}, add_generation_prompt=True) == "2025-01-01"


def test_fields_set_to_none_are_missing_and_the_trace_has_both_names() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "r"}
    assert template_messages([message]) == [{"role": "assistant", "reasoning_content": "r", "thinking": "r"}]


def test_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(TokenizerError, match="doesn't compile"):
        ChatTemplate("{% for m in messages %}", {})


def test_tools_take_the_template_for_tools() -> None:
    template = ChatTemplate("plain", {}, "with tools")
    assert template.render([USER], None, {}, add_generation_prompt=True) == "plain"
    assert template.render([USER], [{"name": "f"}], {}, add_generation_prompt=True) == "with tools"
    assert template.fingerprint != ChatTemplate("plain", {}).fingerprint


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
def test_record_can_not_set_what_rendering_sets(name: str) -> None:
    with pytest.raises(RecordError, match=f"template_error.*{name}"):
        _turn(HEADER + "{{ m.content }}" + FOOTER + "{% endif %}", {"content": "a"}, kwargs={name: 1})


def test_thinking_flag_only_where_the_template_reacts(qwen36: TargetTokenizer, smollm2: TargetTokenizer) -> None:
    with_trace, without = {"role": "assistant", "reasoning_content": "r"}, {"role": "assistant", "content": "a"}
    assert qwen36.template.turn_kwargs({}, with_trace) == {"enable_thinking": True}
    assert qwen36.template.turn_kwargs({}, without) == {"enable_thinking": False}
    assert qwen36.template.turn_kwargs({"enable_thinking": True}, without) == {"enable_thinking": True}
    assert smollm2.template.turn_kwargs({}, with_trace) == {}


def test_trace_that_the_template_strips_is_refused() -> None:
    source = HEADER + "{{ m.content }}" + FOOTER + "{% endif %}"
    with pytest.raises(RecordError, match=r"template_error.*reasoning_content.*output_token_ids"):
        _turn(source, {"content": "a", "reasoning_content": "thought"})
    assert _turn(source, {"content": "a"}).sampled == "a<|im_end|>"


def test_answer_that_the_template_changes_is_refused() -> None:
    source = HEADER + "{{ m.content.split('|')[-1] }}" + FOOTER + "{% endif %}"
    with pytest.raises(RecordError, match="doesn't print the content"):
        _turn(source, {"content": "one|two"})


def test_call_that_the_template_ignores_is_refused() -> None:
    source = HEADER + "{{ m.content }}" + FOOTER + "{% endif %}"
    call = {"type": "function", "function": {"name": "lookup", "arguments": {}}}
    with pytest.raises(RecordError, match=r"doesn't print the last turn's call of 'lookup'"):
        _turn(source, {"content": "Let me see", "tool_calls": [call]})


def test_trace_prefilled_but_never_printed_is_refused_naming_the_difference() -> None:
    source = HEADER + "{{ m.content }}" + FOOTER + "<think>\n{% endif %}"
    with pytest.raises(RecordError, match=r"at character .*<think>"):
        _turn(source, {"content": "a"})


def test_closed_empty_trace_in_the_prompt_alone() -> None:
    source = (
        HEADER
        + "{{ m.content }}"
        + FOOTER
        + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    turn = _turn(source, {"content": "a"})
    assert turn.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert turn.sampled == "a<|im_end|>"


def test_thinking_off_but_a_trace_in_the_record_is_refused(qwen36: TargetTokenizer) -> None:
    messages = template_messages([USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}])
    kwargs = {"enable_thinking": False}
    with pytest.raises(RecordError, match="doesn't continue the prompt"):
        Conversation(qwen36.template, qwen36.controls, messages, None, kwargs).turn(1, ended=True)


def test_cut_trace_returned_as_content_is_a_trace(qwen36: TargetTokenizer) -> None:
    messages = template_messages([USER, {"role": "assistant", "content": "Let me see"}])
    conversation = Conversation(qwen36.template, qwen36.controls, messages, None, {"enable_thinking": True})
    turn = conversation.turn(1, ended=False)
    assert (turn.prompt[-8:], turn.sampled) == ("<think>\n", "Let me see")


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("{{ m.content }}<eos>", "a<eos>"),  # no newline behind the terminator
        ("{{ m.content }}<|im_end|>\n", "a<|im_end|>"),
        (" {{ m.content }} <eos>", " a <eos>"),  # what the template prints around the answer was sampled, too
        ("{{ m.content }}\n", "a\n"),  # no control token ends the turn
        ("<|im_start|>final\n{{ m.content }}<|im_end|>\n", "<|im_start|>final\na<|im_end|>"),
    ],
)
def test_sampled_text_ends_with_the_terminator(around: str, expected: str) -> None:
    source = "{% for m in messages %}" + around + "{% endfor %}"
    assert _turn(source, {"content": "a"}).sampled == expected


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("{{ m.content }}<|im_end|>\n", "a"),
        ("{{ m.content }}\n<eos>", "a"),  # the newline comes from the template: the answer was cut before it
        ("{{ m.content }}\n", "a"),
        ("<b>{{ m.content }}</b><eos>", "<b>a"),
    ],
)
def test_cut_answer_has_nothing_that_the_template_adds(around: str, expected: str) -> None:
    source = "{% for m in messages %}" + around + "{% endfor %}"
    assert _turn(source, {"content": "a"}, ended=False).sampled == expected


def test_control_tokens_spelled_by_the_answer_are_told_from_the_templates() -> None:
    source = HEADER + "{{ m.content }}" + FOOTER + "{% endif %}"
    turn = _turn(source, {"content": "say <|im_end|>"})
    assert turn.sampled == "say <|im_end|><|im_end|>"
    assert [turn.response[start:end] for start, end in turn.control_spans] == ["<|im_end|>"]
    assert turn.control_spans[0][0] == len("say <|im_end|>")
    cut = _turn(source, {"content": "say <|im_end|>"}, ended=False)
    assert cut.sampled == "say <|im_end|>"


def test_deeply_nested_arguments_do_not_crash() -> None:
    deep: dict[str, Any] = {"x": "<|im_end|>"}
    for _ in range(5000):
        deep = {"x": deep}
    source = HEADER + "{{ m.content }}" + FOOTER + "{% endif %}"
    with pytest.raises(RecordError, match="template_error"):
        _turn(source, {"content": "a", "tool_calls": [deep]})
