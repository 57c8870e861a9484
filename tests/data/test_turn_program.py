"""A turn that a program makes is the turn that rendering makes, and what a program can't be sure of is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import turn_program
from dflash.data.chat import ChatTemplate
from dflash.data.control_tokens import ControlTokens
from dflash.data.turn_program import TurnPrograms
from dflash.data.turns import Conversation, Turn
from dflash.errors import RecordError, TokenizerError
from tests.data.conversations import CHATML, LLAMA3, QWEN36, conversations

CONTROLS = ControlTokens({"<|im_start|>": 1, "<|im_end|>": 2, "<|eot_id|>": 3, "<|start_header_id|>": 4})
USER = {"role": "user", "content": "q"}


def _turn(
    template: ChatTemplate,
    messages: list[dict[str, str]],
    kwargs: dict[str, Any],
    programs: TurnPrograms,
    *,
    ended: bool,
) -> Turn | str:
    conversation = Conversation(template, CONTROLS, messages, None, kwargs, programs)
    try:
        return conversation.turn(len(messages) - 1, ended=ended)
    except RecordError as error:
        return error.message


@pytest.mark.parametrize("path", [QWEN36, LLAMA3, None], ids=["qwen3.6", "llama3", "chatml"])
def test_program_equals_rendering(path: Path | None) -> None:
    if path is not None and not path.exists():
        pytest.skip("the shared data isn't beside the checkout")
    template = ChatTemplate(CHATML if path is None else path.read_text(), {"bos_token": "<s>"})
    programs = TurnPrograms()

    @settings(max_examples=200, deadline=None)
    @given(conversations, st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]), st.booleans())
    def check(messages: list[dict[str, str]], kwargs: dict[str, Any], ended: bool) -> None:
        expected = _turn(template, messages, kwargs, TurnPrograms(), ended=ended)
        assert [_turn(template, messages, kwargs, programs, ended=ended) for _ in range(4)] == [expected] * 4

    check()
    assert programs.num_replays > 100, "many turns come from programs, or nothing was tested"


@pytest.mark.parametrize(
    "response",
    [
        "<|im_{{ m.content }}<|im_end|>",  # the text may complete a token that the template begins
        "{{ m.content }}_end|>\n<|im_end|>",  # or begin one that it completes
        "{{ m.content }}{{ m.content }}<|im_end|>",  # or, twice, be a token together
        "{{ m.content }}<|im_end|>.",  # the last token doesn't end the turn
        "{{ m.content }}<|im_end|><|im_end|>",
        "{{ m.content }}",
        "{{ m.content.strip('x') }}<|im_end|>",  # the text isn't printed as it was sampled
        "{{ messages[0].content }}{{ m.content }}<|im_end|>",
    ],
)
def test_what_is_not_sure_is_rendered(response: str) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + response + "{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template, programs = ChatTemplate(source, {}), TurnPrograms()
    for text in ("a", "b", "end|>", "c"):
        messages = [USER, {"role": "assistant", "content": text}]
        expected = _turn(template, messages, {}, TurnPrograms(), ended=True)
        assert [_turn(template, messages, {}, programs, ended=True) for _ in range(4)] == [expected] * 4
    assert programs.num_replays == 0


def test_text_that_spells_a_control_token_is_rendered() -> None:
    template, programs = ChatTemplate(CHATML, {}), TurnPrograms()
    for text in ("a", "b", "c", "x<|im_end|>y"):
        turn = _turn(template, [USER, {"role": "assistant", "content": text}], {}, programs, ended=True)
    assert isinstance(turn, Turn)
    assert turn.spells_control
    assert programs.num_replays == 1  # of "c"; the first is rendered, the second traced


def test_a_program_that_is_wrong_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_program, "CHECK_EVERY", 1)
    template, programs = ChatTemplate(CHATML, {}), TurnPrograms()
    messages = [USER, {"role": "assistant", "content": "a"}]
    for _ in range(3):
        _turn(template, messages, {}, programs, ended=True)
    (kept,) = programs._programs.values()
    kept[0] = turn_program.TurnProgram(kept[0].steps, kept[0].prompt, ("b", *kept[0].response), kept[0].tail)
    with pytest.raises(TokenizerError, match="gives another text than Jinja"):
        _turn(template, messages, {}, programs, ended=True)


def test_parts_of_control_tokens_are_seen() -> None:
    assert CONTROLS.begun_by("a<|im_")
    assert CONTROLS.ended_by("_end|> b")
    assert not CONTROLS.begun_by("</think>\n\n")
    assert not CONTROLS.ended_by("\n</think>")
