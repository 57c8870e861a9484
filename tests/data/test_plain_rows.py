"""Plain rows from native code equal those of the general way, whatever stands in the file."""

from __future__ import annotations

import gc
import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash.config import TokenizeOptions
from dflash.data import plain_rows
from dflash.data.completions import normalise_record, read_completions
from dflash.data.encoders import Ids, Offsets
from dflash.data.lines import ReadLimits
from dflash.data.plain_rows import PlainRows
from dflash.data.records import Completion, Reject
from dflash.data.rows import RowFlag, TokenizedRows
from dflash.data.shard_job import run_shard_job
from dflash.data.spool import LocalInput, ShardJob
from dflash.data.template_trace import MAX_MESSAGES
from dflash.data.tokenize import tokenize_batch
from dflash.data.tokenizer import TargetTokenizer, adapt_tokenizer, load_tokenizer
from dflash.errors import TokenizerError
from dflash.storage.files import file_sha256

PlainRow = pytest.importorskip("dflash.data._plain_rows", reason="no compiler when the package was installed").PlainRow
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "How many?"}
BARE = {"role": "assistant", "content": "Four."}
ANSWER = {"role": "assistant", "reasoning_content": "Two and two.", "content": "Four."}
RECORD = {"id": "a", "messages": [USER, ANSWER], "finish_reason": "stop", "source": "maths"}
SHAPES = ([USER, BARE], [USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, BARE, USER, ANSWER], [USER, ANSWER, USER, BARE])
THINKING: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
OPTIONS = TokenizeOptions(min_loss_tokens=2)
COLUMNS = [field.name for field in fields(TokenizedRows)]

Entry = Completion | Reject | Any


class ByteEncoder:
    """A token a byte, so that rows are compared by the thousand."""

    name = "bytes"

    def encode_batch_flat(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:  # noqa: ARG002
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32), offsets


@pytest.fixture(scope="module", params=["qwen36", "chatml", "smollm2", "llama3_like"])
def target(request: pytest.FixtureRequest) -> TargetTokenizer:
    """A tokenizer that has seen each shape often enough for a program."""
    tokenizer: TargetTokenizer = request.getfixturevalue(request.param)
    return learned(tokenizer)


def learned(tokenizer: TargetTokenizer) -> TargetTokenizer:
    completions = [
        normalise_record({"messages": shape, "finish_reason": "stop", "chat_template_kwargs": kwargs})
        for shape in SHAPES
        for kwargs in THINKING
    ]
    tokenize_batch(completions * 4, tokenizer, OPTIONS, ByteEncoder())
    return tokenizer


def to_lines(*records: Any, ensure_ascii: bool = True) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=ensure_ascii).encode() + b"\n" for record in records)


def read_both(
    path: Path, tokenizer: TargetTokenizer, options: TokenizeOptions = OPTIONS, **limits: int
) -> tuple[list[Entry], list[Entry]]:
    """What the file holds: with plain rows, and as the general way reads it."""
    plain = PlainRows(tokenizer, options).read(path, file="f.jsonl", limits=ReadLimits(**limits))
    return list(plain), list(read_completions(path, file="f.jsonl", limits=ReadLimits(**limits)))


def assert_equal(
    entries: Sequence[Entry],
    expected: Sequence[Entry],
    tokenizer: TargetTokenizer,
    options: TokenizeOptions = OPTIONS,
) -> list[bool]:
    """Compare entry by entry, and the rows of all together; returns which entries are plain rows."""
    assert len(entries) == len(expected)
    for entry, general in zip(entries, expected, strict=True):
        assert (entry.file, entry.line, entry.byte_offset, entry.id) == (
            general.file,
            general.line,
            general.byte_offset,
            general.id,
        )
        assert isinstance(entry, PlainRow) or entry == general
    batches = [
        tokenize_batch([e for e in found if not isinstance(e, Reject)], tokenizer, options, ByteEncoder())
        for found in (entries, expected)
    ]
    assert batches[0].rejects == batches[1].rejects
    for name in COLUMNS:
        values = [getattr(batch.rows, name) for batch in batches]
        assert list(values[0]) == list(values[1]), name
        assert getattr(values[0], "dtype", None) == getattr(values[1], "dtype", None), name
    return [isinstance(entry, PlainRow) for entry in entries]


LETTERS = ["a", "Z", " ", "é", "漢", "ひ", "Я", "😀", "Four.", "x" * 40]
SIGNS = ["\n", "\t", "\u3000", "\x1f", "\x00", '"', "\\", "/", "\u2028", "\x85", "<", "{"]
TAGS = ["<|im_end|>", "<|eot_id|>", "</think>", "<think>", "<tool_response>", "</tool_response>"]
calm = st.lists(st.sampled_from(LETTERS + SIGNS), max_size=12).map("".join)
texts = calm | st.lists(st.sampled_from(LETTERS + SIGNS + TAGS), max_size=12).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional={"reasoning_content": texts}),
    st.fixed_dictionaries(
        {"content": texts | st.none(), "role": st.just("assistant")},
        optional={"reasoning_content": texts | st.none(), "name": st.none(), "tool_calls": st.none()},
    ),
)
turns = st.one_of(
    st.tuples(calm, calm).map(lambda t: [{"role": "user", "content": t[0]}, {"role": "assistant", "content": t[1]}]),
    st.tuples(calm, calm, calm).map(
        lambda t: [
            {"role": "user", "content": t[0]},
            {"reasoning_content": t[1], "role": "assistant", "content": t[2]},
        ]
    ),
    st.lists(messages, max_size=4),
)
records = st.fixed_dictionaries(
    {"messages": turns},
    optional={
        "id": texts | st.integers(-3, 10**20) | st.none(),
        "source": texts | st.none(),
        "model": texts | st.none(),
        "finish_reason": st.just("stop") | st.sampled_from(["STOP", "length", "eos", "tool_calls", "", None, "error"]),
        "output_tokens": st.integers(0, 60) | st.none() | st.sampled_from([-1, 1.0, 10**30]),
        "chat_template_kwargs": st.sampled_from([None, *THINKING, {"enable_thinking": None}, {"x": 1}]),
        "tools": st.none() | st.just([]),
        "usage": values,
        "größe": values,
    },
)


def test_rows_are_the_general_ways(target: TargetTokenizer, tmp_path: Path) -> None:
    num_plain = 0

    @settings(max_examples=150, deadline=None)
    @given(st.lists(records, min_size=1, max_size=12), st.booleans(), st.sampled_from([8192, 60, 20]))
    def check(found: list[dict[str, Any]], ensure_ascii: bool, max_seq_len: int) -> None:
        nonlocal num_plain
        options = TokenizeOptions(max_seq_len=max_seq_len, min_loss_tokens=2)
        path = tmp_path / "f.jsonl"
        path.write_bytes(to_lines(*found, ensure_ascii=ensure_ascii))
        num_plain += sum(assert_equal(*read_both(path, target, options), target, options))

    check()
    assert num_plain > 10, "some rows are plain, or nothing was tested"


INSERTS = (b'"', b"\\", b"{", b"}", b",", b":", b" ", b"0", b"\xed\xa0\x80", b"\xc3", b"\\u00e9", b"\x01")


def test_damaged_lines_are_the_general_ways(target: TargetTokenizer, tmp_path: Path) -> None:
    """Bytes changed, dropped, doubled or put in: whatever the general code makes of a line is what comes out."""
    rng = random.Random(1)
    good = [
        to_lines({**RECORD, "messages": shape, "output_tokens": 3, "usage": {"a": [1, -2.5e3, True, None, "\n"]}})
        for shape in SHAPES
    ]
    good += [line.decode().replace("Four", "Vier ist größer 漢字").encode() for line in good]
    lines = []
    for number in range(6000):
        line = bytearray(good[number % len(good)][:-1])
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(len(line))
            part, byte = bytes(line[at : at + 9]), bytes([rng.randrange(256)])
            line[at : at + rng.randrange(3)] = rng.choice((b"", part, byte, rng.choice(INSERTS)))
        lines.append(bytes(line).replace(b"\n", b" "))
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = assert_equal(*read_both(path, target), target)
    assert found.count(True) > 150
    assert found.count(False) > 3000


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"id": 7},
        {"id": ""},
        {"id": None, "source": None, "finish_reason": None, "tools": None, "model": "m"},
        {"output_tokens": 12},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"usage": {"prompt_tokens": 3, "details": [{"a": 1}, {"a": 2}], "price": 1e-3}},
        {"messages": [{**USER, "name": None}, {**ANSWER, "tool_calls": None, "refusal": None}]},
        {"messages": [USER, {**ANSWER, "content": '漢字\t"quoted" 😀'}]},
        {"messages": [USER, {**ANSWER, "content": "a < b | c"}]},
    ],
)
def test_plain_records_are_planned_natively(change: dict[str, Any], qwen36: TargetTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines({**RECORD, **change}))
    assert assert_equal(*read_both(path, learned(qwen36)), qwen36) == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "length"},
        {"finish_reason": "Stop"},
        {"finish_reason": "error"},
        {"id": -1},
        {"id": True},
        {"output_tokens": 1e3},
        {"output_tokens": 10**19},
        {"output_token_ids": [1, 2]},
        {"prompt_token_ids": [1, 2]},
        {"tools": [{"type": "function"}]},
        {"conversations": []},
        {"chat_template_kwargs": {"enable_thinking": 1}},
        {"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
        {"messages": []},
        {"messages": [USER]},
        {"messages": [USER, ANSWER, USER]},
        {"messages": [USER, {**ANSWER, "content": "It ends with <|im_end|>"}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "<|endoftext|>"}]},
        {"messages": [USER, {**BARE, "content": "<think>\na\n</think>\n\nb"}]},
        {"messages": [USER, {**BARE, "content": " \n"}]},
        {"messages": [USER, {**ANSWER, "name": "x"}]},
        {"messages": [USER, {**BARE, "content": None}]},
        {"messages": [USER, {**BARE, "reasoning": "a"}]},
        {"messages": [{**USER, "content": [{"type": "text", "text": "a"}]}, ANSWER]},
        {"messages": [{**USER, "role": "human"}, ANSWER]},
        {"messages": [{**USER, "reasoning_content": "a"}, ANSWER]},
        {"messages": [{**USER, "content": "a" * 9000}, ANSWER]},  # may not fit
        {"messages": [USER, ANSWER] * 33},
        {"usage": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]},
        {"usage": 10**80},
    ],
)
def test_other_records_go_the_general_way(change: dict[str, Any], qwen36: TargetTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines({**RECORD, **change}))
    options = TokenizeOptions(max_seq_len=1000, min_loss_tokens=2)
    assert assert_equal(*read_both(path, learned(qwen36), options), qwen36, options) == [False]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b'"id"', b'"source"'),  # twice the same key
        lambda line: line.replace(b'"id"', b'"s\\u006furce"'),
        lambda line: line.replace(b'"role": "user"', b'"role": "user", "role": "user"'),
        lambda line: line.replace(b'"a"', b"NaN"),
        lambda line: line.replace(b'"a"', b"01"),
        lambda line: line.replace(b'"a"', b"[1,]"),
        lambda line: line.replace(b'"a"', b'{"x": {"y": 1, "y": 2}}'),
        lambda line: line.replace(b"How", b"\\ud83d"),
        lambda line: line.replace(b"How", b"\\ude00\\ud83d"),
        lambda line: line.replace(b"How", b"\xc0\xaf"),
        lambda line: line.replace(b"How", b"\xed\xa0\x80"),
        lambda line: line.replace(b"How", b"\xf4\x90\x80\x80"),
        lambda line: line.replace(b"How", b"a\tb"),
        lambda line: line.replace(b"How", b"\\x"),
        lambda line: line + b"x",
        lambda line: line[:-1],
        lambda line: b"\xef\xbb\xbf" + line,
        lambda line: b"  " + line,
        lambda line: b"[" + line + b"]",
    ],
)
def test_what_is_not_plain_json_goes_the_general_way(
    damage: Callable[[bytes], bytes], qwen36: TargetTokenizer, tmp_path: Path
) -> None:
    line = to_lines(RECORD)[:-1]
    assert damage(line) != line
    path = tmp_path / "f.jsonl"
    path.write_bytes(damage(line) + b"\n")
    assert assert_equal(*read_both(path, learned(qwen36)), qwen36) == [False]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blocks_keep_lines_and_their_places(suffix: str, qwen36: TargetTokenizer, tmp_path: Path) -> None:
    """Lines over the ends of blocks, blank ones, CRLF, too long ones, and a last one without a newline."""
    records = [{**RECORD, "id": str(number), "usage": "x" * (number * 997 % 20_000)} for number in range(300)]
    lines = [line + b"\r" * (number % 3 == 0) for number, line in enumerate(to_lines(*records).splitlines())]
    lines[5:5] = [b"", b" \t", b'{"id": "' + b"y" * 600_000 + b'"}', b""]
    data = b"\n".join(lines)
    path = tmp_path / f"f{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    for limit in (20_000, 1 << 19, 1 << 21):
        entries, expected = read_both(path, learned(qwen36), max_record_bytes=limit)
        num_plain = assert_equal(entries, expected, qwen36).count(True)
        assert num_plain < 299 if limit < 1 << 20 else num_plain == 299, "a block may not be longer than a line"
    if suffix.endswith("gz"):
        path.write_bytes(path.read_bytes()[:-2000])
        entries, expected = read_both(path, qwen36)
        assert_equal(entries, expected, qwen36)
        assert isinstance(entries[-1], Reject)


def test_trimmed_white_space_is_counted_as_the_general_way_counts_it(qwen36: TargetTokenizer, tmp_path: Path) -> None:
    """Each count of sampled tokens around the right one: whether it fits the trimmed text, the whole one, or none."""
    trimmed = {**ANSWER, "content": "Four.  \n"}
    records = [{**RECORD, "messages": [USER, trimmed], "output_tokens": count} for count in range(20, 60)]
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(*records))
    entries, expected = read_both(path, learned(qwen36))
    assert all(assert_equal(entries, expected, qwen36))
    flags = tokenize_batch(entries, qwen36, OPTIONS, ByteEncoder()).rows.flags
    assert np.count_nonzero(flags == 0) == 1
    assert np.count_nonzero(flags & RowFlag.VERBATIM_WHITESPACE) == 1


@pytest.mark.parametrize("field", ["prompt", "response", "source", "output_tokens", "is_thinking_only"])
def test_a_row_that_differs_stops_the_run(field: str, qwen36: TargetTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(RECORD, RECORD))
    (row, other), _ = read_both(path, learned(qwen36))
    values = zip(PlainRow.__match_args__, row, strict=True)
    changed = PlainRow([1 if name == field else value for name, value in values])
    assert row.data is not None, "the first row can be made again"
    assert other.data is None
    with pytest.raises(TokenizerError, match=r"f.jsonl, line 1: native code makes another row than Python"):
        tokenize_batch([other, changed], qwen36, OPTIONS, ByteEncoder())


def test_rows_are_compared_with_jinja_too(qwen36_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = learned(load_tokenizer(qwen36_dir))
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(*[RECORD] * 2000))
    entries, _ = read_both(path, tokenizer)
    rendered = 0
    real = type(tokenizer.template).render_untraced

    def count(*arguments: Any, **named: Any) -> str:
        nonlocal rendered
        rendered += 1
        return real(*arguments, **named)

    monkeypatch.setattr(type(tokenizer.template), "render_untraced", count)
    for start in range(0, 2000, 500):
        tokenize_batch(entries[start : start + 500], tokenizer, OPTIONS, ByteEncoder())
    assert rendered == 2, "one turn of 1,024 or more is rendered, as prompt and as a whole"


def test_shards_are_the_same_without_native_code(
    smollm2_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = learned(load_tokenizer(smollm2_tokenizer_dir))
    path = tmp_path / "f.jsonl"
    lines = [
        to_lines(
            {**RECORD, "id": None, "messages": [USER, {**BARE, "content": f"It is {number}."}], "finish_reason": reason}
        )
        for number, reason in enumerate(("stop", "stop", "length", "error", None) * 300)
    ]
    path.write_bytes(b"".join([*lines, b"{torn"]))
    item = LocalInput("f.jsonl", path, path.stat().st_size, None, file_sha256(path), is_own=True)
    receipts = []
    for module in (plain_rows._plain_rows, None):
        monkeypatch.setattr(plain_rows, "_plain_rows", module)
        job = ShardJob("0" * 64, (item,), OPTIONS, tmp_path / str(module is None))
        receipts.append(run_shard_job(job, tokenizer))
    assert receipts[0] == receipts[1]
    assert receipts[0].shard.num_rows == 1200


def test_a_step_that_native_code_does_not_know_is_left_to_python(smollm2_tokenizer_dir: Path, tmp_path: Path) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    loaded.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ 'b' if m.content.startswith('o', 1) else '' }}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = learned(adapt_tokenizer(loaded))
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines({**RECORD, "messages": [USER, BARE]}))
    assert assert_equal(*read_both(path, tokenizer), tokenizer) == [False]


def test_each_batch_has_a_row_that_can_be_made_again(qwen36: TargetTokenizer, tmp_path: Path) -> None:
    """Short lines too, of which a block holds thousands."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(*[RECORD] * 3000))
    entries, _ = read_both(path, learned(qwen36))
    carried = [number for number, row in enumerate(entries) if row.data is not None]
    assert carried == list(range(0, 3000, 256))


def test_conversations_of_any_length_are_the_general_ways(qwen36_dir: Path, tmp_path: Path) -> None:
    """As many messages as are traced, each with tests of its own: programs that native code has no room for too."""
    loaded = PreTrainedTokenizerFast.from_pretrained(qwen36_dir)
    tests = "".join(f"{{% if m.content.startswith('{sign}') %}}{sign}{{% endif %}}" for sign in "0123456789")
    cuts = "".join(f"{{{{ (m.content.strip('{sign}'))[:0] if false else '' }}}}" for sign in "ab")
    loaded.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + tests + cuts + "{{ m.content.strip() }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = adapt_tokenizer(loaded)
    for turns_of_two in (1, 32):
        completion = Completion(
            "a", [USER, BARE] * turns_of_two, None, "stop", None, {}, None, None, None, None, "f", 1, 0
        )
        tokenize_batch([completion] * 4, tokenizer, OPTIONS, ByteEncoder())
        path = tmp_path / "f.jsonl"
        path.write_bytes(to_lines({**RECORD, "messages": [USER, BARE] * turns_of_two}))
        assert assert_equal(*read_both(path, tokenizer), tokenizer) == [True]


def test_a_program_with_too_many_cuts_is_left_to_python(
    qwen36: TargetTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned(qwen36)
    monkeypatch.setattr(plain_rows._plain_rows, "MAX_REGISTERS", 3)
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(RECORD))
    assert assert_equal(*read_both(path, qwen36), qwen36) == [False]


@pytest.mark.parametrize(
    ("steps", "prompt"),
    [
        ((("strip", 0, None, None),) * 600, ()),
        ((("upper", 0, None, None),), ()),
        ((("strip", 1, None, None),), ()),
        ((("strip", 0, 1, None),), ()),
        ((("strip", 0, None, True),), ()),
        ((("contains", 0, "a", None),), ()),
        ((("contains", 0, 7, True),), ()),
        ((("contains", 0, "\ud800", True),), ()),
        ((), (1,)),
        ((), (-1,)),
        ((), (None,)),
    ],
)
def test_programs_that_make_no_sense_are_refused(steps: Any, prompt: Any) -> None:
    planner = plain_rows._plain_rows.Planner((), max_prompt_characters=9, script_characters=9)
    with pytest.raises((ValueError, TypeError)):
        planner.add(b"nua", 1, steps, prompt, ())


def test_limits_are_the_general_ways() -> None:
    assert plain_rows._plain_rows.MAX_MESSAGES == MAX_MESSAGES


def test_half_a_surrogate_pair_in_a_template_rejects_as_the_general_way(
    smollm2_tokenizer_dir: Path, tmp_path: Path
) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    loaded.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\ud800' }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\ud800' }}\n{% endif %}"
    )
    tokenizer = learned(adapt_tokenizer(loaded))
    assert tokenizer.turn_programs.found, "there is a program that native code can't have"
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines({**RECORD, "messages": [USER, BARE]}))
    assert assert_equal(*read_both(path, tokenizer), tokenizer) == [False]
    (reject,) = tokenize_batch(read_both(path, tokenizer)[0], tokenizer, OPTIONS).rejects
    assert reject.reason == "invalid_unicode"


def test_a_planner_at_work_refuses_more(qwen36: TargetTokenizer, tmp_path: Path) -> None:
    """A finalizer that runs while rows are made would move the texts that they are made of."""
    learned(qwen36)
    path = tmp_path / "f.jsonl"
    path.write_bytes(to_lines(*[RECORD] * 500))
    reader = PlainRows(qwen36, OPTIONS)
    assert len(list(reader.read(path, file="f"))) == 500
    refused: list[str] = []

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            try:
                reader._planner.plan(b"x" * 100_000, "f", 1, 0)  # type: ignore[union-attr]
            except RuntimeError as error:
                refused.append(str(error))

    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(50):
            Finalized()
            assert reader._planner is not None
            assert len(reader._planner.plan(path.read_bytes(), "f", 1, 0)) == 500
    finally:
        gc.set_threshold(*thresholds)
    assert refused
