"""A replayed template equals Jinja on every conversation, whatever the template does to the texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash.data import template_trace
from dflash.data.template_trace import PROBES, TracedTemplate
from dflash.errors import TokenizerError
from tests.data.conversations import CHATML, LLAMA3, QWEN36, conversations

# What templates in the wild do to texts: followed, refused or seen through, the result has to be Jinja's.
IDIOMS = (
    "{{ m.content | trim }}",
    "{{ m.content.strip('\n') + '!' }}",
    "{% if m.content.startswith('<b>') %}B{% else %}{{ m.content }}{% endif %}",
    "{% if 'true' in m.content %}T{% endif %}{{ m.content }}",
    "{% if m.content %}{{ m.content }}{% else %}none{% endif %}",
    "{% if m.content == 'true' %}T{% elif m.content != '' %}{{ m.content }}{% endif %}",
    "{{ m.content | upper }}",
    "{{ m.content | length }}",
    "{{ m.content | tojson }}",
    "{{ m.content | e }}",
    "{{ m.content | title }}",
    "{{ m.content | replace('a', 'b') }}",
    "{{ m.content ~ '~' }}",
    "{{ '%s!' | format(m.content) }}",
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
    "{{ m.content[:3] }}",
    "{% for c in m.content %}{{ c }}-{% endfor %}",
    "{% set text = [m.content, 'x'] | join(',') %}{{ text }}",
    "{% if m.content < 'b' %}less{% endif %}{{ m.content }}",
    "{% if (m.content | trim) == (m.content | trim | trim) %}same{% endif %}",
    "{% if m.content in ['true', ''] %}listed{% endif %}",
    "{% if m.content is none %}none{% elif m.content is string %}{{ m.content }}{% endif %}",
    "{% set d = {m.content: 1} %}{{ d | length }}",
    "{% macro show(text) %}[{{ text }}]{% endmacro %}{{ show(m.content) | trim }}",
    "{% set ns = namespace(last='') %}{% set ns.last = m.content %}{{ ns.last }}",
    "{{ m.content | int(0) }}",
    "{{ m.content is mapping }}{{ m.content is iterable }}",
)


def _template(source: str) -> tuple[TracedTemplate, Any]:
    compiled = _compile_jinja_template(source)
    return TracedTemplate(compiled, source, compiled.render), compiled


def _equal(template: TracedTemplate, compiled: Any, messages: list[dict[str, str]], **variables: Any) -> None:
    """Rendered three times, by Jinja, with a trace being made, and from it, or refused each time."""
    kind = tuple(sorted(variables.items()))
    try:
        expected = compiled.render({**variables, "messages": messages})
    except Exception as error:  # noqa: BLE001 (what the template raises has to be raised alike)
        for _ in range(3):
            with pytest.raises(type(error)):
                template.render(messages, variables, kind)
        return
    assert [template.render(messages, variables, kind) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("path", [QWEN36, LLAMA3, None], ids=["qwen3.6", "llama3", "chatml"])
def test_replay_equals_jinja(path: Path | None) -> None:
    if path is not None and not path.exists():
        pytest.skip("the shared data isn't beside the checkout")
    template, compiled = _template(CHATML if path is None else path.read_text())

    @settings(max_examples=200, deadline=None)
    @given(conversations, st.booleans(), st.booleans())
    def check(messages: list[dict[str, str]], prompt: bool, thinking: bool) -> None:
        _equal(template, compiled, messages, add_generation_prompt=prompt, enable_thinking=thinking, bos_token="<s>")

    check()
    assert template.num_replays > 100, "most conversations are replayed, or nothing was tested"


@pytest.mark.parametrize("idiom", IDIOMS)
def test_any_idiom_equals_jinja(idiom: str) -> None:
    template, compiled = _template("{% for m in messages %}" + idiom + "|{% endfor %}")
    for first in PROBES:
        for second in (*PROBES, "b", "<b>x"):
            _equal(template, compiled, [{"role": "user", "content": first}, {"role": "user", "content": second}])


def test_real_turns_are_replayed() -> None:
    if not QWEN36.exists():
        pytest.skip("the shared data isn't beside the checkout")
    template, compiled = _template(QWEN36.read_text())
    calls = []

    def reference(variables: Any) -> str:
        calls.append(1)
        return str(compiled.render(variables))

    template._reference = reference
    for number in range(500):
        answer = {"role": "assistant", "content": f"4{number}", "reasoning_content": f"2+{number}", "thinking": "t"}
        template.render([{"role": "user", "content": f"q{number}?"}, answer], {}, ())
    assert template.num_replays == 498
    assert len(calls) <= 2 + 2 * len(PROBES), "the reference renders the first two and the probes"


def test_arguments_of_other_types_are_other_shapes() -> None:
    template, compiled = _template("{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    for value in (1, True, 1.0, "1", None):
        for _ in range(3):
            kind = (value.__class__, value)
            found = template.render([{"role": "user", "content": "a"}], {"x": value}, kind)
            assert found == f"{value}a"
    assert compiled.render(x=True, messages=[]) == "True"


def test_a_wrong_replay_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trace, "CHECK_EVERY", 2)
    template, compiled = _template(CHATML)
    messages = [{"role": "user", "content": "a"}]
    for _ in range(3):
        template.render(messages, {}, ())
    template._reference = lambda variables: compiled.render(variables) + "other"
    with pytest.raises(TokenizerError, match=r"another text than Jinja .* at character 29"):
        template.render(messages, {}, ())
    assert template.num_replays == 2


def test_shapes_without_end_are_left_to_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trace, "MAX_SHAPES", 3)
    monkeypatch.setattr(template_trace, "MAX_TRACES", 2)
    template, compiled = _template(CHATML)
    for length in range(1, 80):
        _equal(template, compiled, [{"role": "user", "content": "a"}] * length)
    assert template.num_traces == 2
