"""Conversations that exercise what templates do to texts, for tests that compare ways to render them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from dflash.data.template_trace import PROBES

QWEN36 = Path(__file__).parents[2].parent / "shared" / "data" / "qwen3.6" / "chat_template.jinja"
LLAMA3 = Path(__file__).parent / "templates" / "llama3_like.jinja"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

texts = st.one_of(st.sampled_from(PROBES), st.text(max_size=12), st.sampled_from(["b", "a true b", "<b>x", "\n"]))
users = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts})
answers = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}),
    st.builds(
        lambda text, trace: {"role": "assistant", "content": text, "reasoning_content": trace, "thinking": trace},
        texts,
        texts,
    ),
)
systems = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
conversations = st.builds(
    lambda first, turns: [*first, *(message for turn in turns for message in turn)],
    st.lists(systems, max_size=1),
    st.lists(st.tuples(users, answers), min_size=1, max_size=3),
)
