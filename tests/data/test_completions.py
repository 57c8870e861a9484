"""Reading files: every format, every kind of damage, positions, memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.data.completions import Completion, ReadLimits, Reason, Reject, read_completions
from dflash.data.lines import iter_lines
from dflash.data.strict_json import MAX_DEPTH, parse_json
from dflash.errors import ObjectNotFoundError, RecordError

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
MEBIBYTE = 1 << 20


def record(text: str = "yes", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    return {"messages": messages, **fields}


def line(text: str = "yes", **fields: Any) -> bytes:
    return json.dumps(record(text, **fields), ensure_ascii=False).encode()


def compress(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    if suffix.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return data


def read(folder: Path, data: bytes, suffix: str = ".jsonl", **limits: int) -> list[Completion | Reject]:
    path = folder / f"part{suffix}"
    path.write_bytes(data)
    return list(read_completions(path, file=path.name, limits=ReadLimits(**limits)))


def outcomes(entries: list[Completion | Reject]) -> list[tuple[int, str]]:
    """(line, answer) of completions, (line, reason) of rejects."""
    return [(e.line, e.reason if isinstance(e, Reject) else e.messages[-1]["content"]) for e in entries]


@pytest.mark.parametrize("suffix", FORMATS)
def test_positions_count_blank_lines_and_carriage_returns(tmp_path: Path, suffix: str) -> None:
    data = b"\xef\xbb\xbf" + line("a") + b"\r\n" + b"\n \t\r\n" + line("b") + b"\n" + b"{}\n" + line("c")
    entries = read(tmp_path, compress(data, suffix), suffix)
    assert outcomes(entries) == [(1, "a"), (4, "b"), (5, Reason.BAD_FIELD), (6, "c")]
    rows = data.split(b"\n")
    for entry in entries:
        assert data[entry.byte_offset :].split(b"\n")[0] == rows[entry.line - 1]
    assert entries[0].sample_id == f"part{suffix}:1"


def test_only_the_newline_ends_a_record(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    data = b'{"messages": [{"role": "assistant", "content": "' + text.replace("\x0b", "").replace("\x0c", "").encode()
    assert outcomes(read(tmp_path, data + b'"}]}\n')) == [(1, "a\u2028b\u2029c\x85def")]


@pytest.mark.parametrize("suffix", FORMATS)
def test_empty_and_blank_files_yield_nothing(tmp_path: Path, suffix: str) -> None:
    assert read(tmp_path, b"", suffix) == []
    assert read(tmp_path, compress(b"", suffix), suffix) == []
    assert read(tmp_path, compress(b"\xef\xbb\xbf\r\n\n", suffix), suffix) == []


def test_a_byte_order_mark_in_the_middle_is_what_joining_files_leaves(tmp_path: Path) -> None:
    data = line("a") + b"\n\xef\xbb\xbf" + line("b") + b"\n"
    assert outcomes(read(tmp_path, data)) == [(1, "a"), (2, "b")]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"batch/gone\.jsonl"):
        list(read_completions(tmp_path / "gone.jsonl", file="batch/gone.jsonl"))


@pytest.mark.parametrize(
    ("bad", "reason", "said"),
    [
        (b'{"messages": "\xff"}', Reason.INVALID_UTF8, "0xff at byte 14"),
        (b'{"messages": "\xed\xa0\x80"}', Reason.INVALID_UTF8, "0xed"),
        ("{}".encode("utf-16"), Reason.INVALID_UTF8, "UTF-8"),
        (b'{"messages": [}', Reason.INVALID_JSON, "character 14"),
        (b"{'messages': []}", Reason.INVALID_JSON, "character 1"),
        (line() + line(), Reason.INVALID_JSON, "Extra data"),
        (b'{"messages": [] // none\x00}', Reason.INVALID_JSON, "JSON"),
        (b'{"a": "tab\there"}', Reason.INVALID_JSON, "control character"),
        (b'{"a": NaN}', Reason.INVALID_NUMBER, "NaN"),
        (b'{"a": -Infinity}', Reason.INVALID_NUMBER, "-Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", Reason.INVALID_NUMBER, "4300"),
        (b'{"a": "\\ud83d"}', Reason.INVALID_UNICODE, "U+D83D"),
        (b'{"a": "\\ude00 x"}', Reason.INVALID_UNICODE, "U+DE00"),
        (b'{"\\ud83d\\ud83d": 1}', Reason.INVALID_UNICODE, "U+D83D"),
        (b'{"a": 1, "a": 1}', Reason.DUPLICATE_KEY, "'a'"),
        (b'{"tools": [{"x": {"b": 1, "c": 2, "\\u0062": 3}}]}', Reason.DUPLICATE_KEY, "'b'"),
        (b'{"a": ' + b"[" * 1000 + b"]" * 1000 + b"}", Reason.TOO_DEEP, "200"),
        (b'{"a": ' + b'{"b":' * 100_000 + b"1" + b"}" * 100_001, Reason.TOO_DEEP, "200"),
        (b"[1, 2]", Reason.NOT_AN_OBJECT, "list"),
        (b'"text"', Reason.NOT_AN_OBJECT, "str"),
        (b"null", Reason.NOT_AN_OBJECT, "None"),
        (line(tools=[{"x": 7}]).replace(b"7", b"1e999"), Reason.INVALID_NUMBER, "inf"),
        (line(chat_template_kwargs={"x": [7]}).replace(b"7", b"-1e999"), Reason.INVALID_NUMBER, "-inf"),
    ],
)
def test_a_bad_line_is_rejected_and_its_neighbours_are_kept(
    tmp_path: Path, bad: bytes, reason: Reason, said: str
) -> None:
    before = line("before")
    entries = read(tmp_path, before + b"\n" + bad + b"\n" + line("after") + b"\n")
    assert outcomes(entries) == [(1, "before"), (2, reason), (3, "after")]
    reject = entries[1]
    assert isinstance(reject, Reject)
    assert reject.file == "part.jsonl"
    assert reject.byte_offset == len(before) + 1
    assert said in reject.message
    assert len(reject.message) < 800


def test_a_reject_names_the_record(tmp_path: Path) -> None:
    entries = read(tmp_path, line("", id="r1") + b"\n" + line("", id=7) + b"\n" + line("", id=True) + b"\n")
    assert [e.id for e in entries] == ["r1", "7", None]
    assert outcomes(entries) == [(1, Reason.EMPTY_RESPONSE), (2, Reason.EMPTY_RESPONSE), (3, Reason.EMPTY_RESPONSE)]


def test_values_are_kept_as_they_are(tmp_path: Path) -> None:
    tools = [{"z": 2**70, "a": [1.0, 1, -0.0, 1e5, None, True, {"": []}], "é\u2028": "😀"}, {"other": {}}]
    first, second = read(tmp_path, line(tools=tools) + b"\n" + line(tools=[{"only": 1}]) + b"\n")
    assert isinstance(first, Completion)
    assert isinstance(second, Completion)
    assert repr(first.tools) == repr(tools)  # equal would not tell 1 from 1.0 or True, nor the order of keys
    assert second.tools == [{"only": 1}]


def test_nesting_up_to_the_limit_is_read(tmp_path: Path) -> None:
    depth = MAX_DEPTH - 3  # the record, the list of tools and the tool are levels too
    deep = json.loads("[" * depth + "]" * depth)
    (entry,) = read(tmp_path, line(tools=[{"x": deep}]))
    assert isinstance(entry, Completion)


@pytest.mark.parametrize("cut", [1, 20, -1, -3, -26])
def test_a_torn_last_line(tmp_path: Path, cut: int) -> None:
    torn = line("ünïcödé 漢字")
    torn = torn[: cut if cut > 0 else len(torn) + cut]
    assert outcomes(read(tmp_path, line("a") + b"\n" + torn)) == [(1, "a"), (2, Reason.TORN_LINE)]


def test_a_line_torn_within_a_character(tmp_path: Path) -> None:
    whole = line("漢")
    torn = whole[: whole.index("漢".encode()) + 1]
    assert outcomes(read(tmp_path, torn)) == [(1, Reason.TORN_LINE)]


def test_a_last_line_without_newline_is_read(tmp_path: Path) -> None:
    assert outcomes(read(tmp_path, line("a") + b"\n" + line("b") + b"\r")) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_members_and_frames_follow_one_another(tmp_path: Path, suffix: str) -> None:
    halves = line("a") + b"\n" + line("b")[:9], line("b")[9:] + b"\n" + line("c") + b"\n"
    data = compress(halves[0], suffix) + compress(b"", suffix) + compress(halves[1], suffix)
    padding = b"\0" * 600_000 if suffix.endswith(".gz") else b"\x5a\x2a\x4d\x18\x03\0\0\0abc"  # a skippable frame
    assert outcomes(read(tmp_path, data + padding, suffix)) == [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_content_decides_on_the_format(tmp_path: Path, suffix: str) -> None:
    assert outcomes(read(tmp_path, compress(line("a"), suffix))) == [(1, "a")]


def test_a_frame_without_size_and_checksum(tmp_path: Path) -> None:
    writer = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compressobj()
    data = writer.compress(line("a") + b"\n") + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    data += writer.compress(line("b")) + writer.flush()
    assert outcomes(read(tmp_path, data, ".jsonl.zst")) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_a_cut_file_keeps_what_lies_before_the_cut(tmp_path: Path, suffix: str) -> None:
    texts = [f"{i} {hash_text(i)}" for i in range(4000)]
    data = b"".join(line(text) + b"\n" for text in texts)
    packed = compress(data, suffix)
    whole = read(tmp_path, packed, suffix)
    assert outcomes(whole) == list(enumerate(texts, start=1))
    for size in (1, 3, 5, 9, len(packed) // 2, len(packed) - 9, len(packed) - 1):
        *kept, fault = read(tmp_path, packed[:size], suffix)
        assert isinstance(fault, Reject)
        assert fault.reason == Reason.TRUNCATED_FILE, size
        assert outcomes(kept) == list(enumerate(texts, start=1))[: len(kept)]
        assert fault.line == data[: fault.byte_offset].count(b"\n") + 1
        assert len(kept) == fault.line - 1
    assert len(kept) == len(texts)


def hash_text(number: int) -> str:
    """Text that doesn't compress to nothing."""
    return f"{zlib.crc32(str(number).encode()):08x}{zlib.adler32(str(number * 7).encode()):08x}" * 2


def test_a_whole_record_without_newline_before_the_cut_is_kept(tmp_path: Path) -> None:
    packed = gzip.compress(line("a") + b"\n" + line("b"), mtime=0)[:-8]  # the checksum is lost, the text is whole
    assert outcomes(read(tmp_path, packed, ".jsonl.gz")) == [(1, "a"), (2, "b"), (2, Reason.TRUNCATED_FILE)]


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_damaged_compression_is_one_reject(tmp_path: Path, suffix: str) -> None:
    data = b"".join(line(hash_text(i)) + b"\n" for i in range(20_000))
    packed = bytearray(compress(data, suffix))
    packed[len(packed) // 2 :: 64] = bytes(byte ^ 0xFF for byte in packed[len(packed) // 2 :: 64])
    *kept, fault = read(tmp_path, bytes(packed), suffix)
    assert isinstance(fault, Reject)
    assert fault.reason == Reason.CORRUPT_STREAM
    assert len(kept) > 1000
    assert "no checksum" in fault.message


@pytest.mark.parametrize("suffix", FORMATS[1:])
@pytest.mark.parametrize("content", [b"not compressed at all", line("a") + b"\n"])
def test_a_name_that_promises_compression(tmp_path: Path, suffix: str, content: bytes) -> None:
    assert outcomes(read(tmp_path, content, suffix)) == [(1, Reason.CORRUPT_STREAM)]
    garbage = compress(line("a") + b"\n", suffix) + b"garbage"
    assert outcomes(read(tmp_path, garbage, suffix)) == [(1, "a"), (2, Reason.CORRUPT_STREAM)]


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_a_wrong_checksum_is_seen(tmp_path: Path, suffix: str) -> None:
    packed = bytearray(compress(line("a") + b"\n", suffix))
    packed[-5 if suffix.endswith(".gz") else -1] ^= 1
    kept = [] if suffix.endswith(".gz") else [(1, "a")]  # zlib gives nothing of the step in which the checksum fails
    assert outcomes(read(tmp_path, bytes(packed), suffix)) == [*kept, (len(kept) + 1, Reason.CORRUPT_STREAM)]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_record_over_the_limit_is_skipped(tmp_path: Path, suffix: str) -> None:
    data = line("a") + b"\n" + line("x" * 500) + b"\n" + line("b") + b"\n" + line("y" * 500)
    entries = read(tmp_path, compress(data, suffix), suffix, max_record_bytes=200)
    assert outcomes(entries) == [(1, "a"), (2, Reason.RECORD_TOO_LARGE), (3, "b"), (4, Reason.RECORD_TOO_LARGE)]
    assert [e.byte_offset for e in entries] == [data.index(row) for row in data.split(b"\n")]


def test_the_limit_is_the_last_length_that_is_read(tmp_path: Path) -> None:
    size = len(line("abc"))
    assert outcomes(read(tmp_path, line("abc") + b"\n", max_record_bytes=size)) == [(1, "abc")]
    assert outcomes(read(tmp_path, line("abc") + b"\n", max_record_bytes=size - 1)) == [(1, Reason.RECORD_TOO_LARGE)]


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_a_decompression_bomb_is_bounded_in_memory_and_size(tmp_path: Path, suffix: str) -> None:
    packed = compress(line("a") + b"\n" + b" " * (64 * MEBIBYTE), suffix)
    assert len(packed) < 100_000
    tracemalloc.start()
    try:
        entries = read(tmp_path, packed, suffix, max_record_bytes=MEBIBYTE, min_bomb_bytes=32 * MEBIBYTE, max_ratio=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes(entries) == [(1, "a"), (2, Reason.RECORD_TOO_LARGE), (2, Reason.FILE_TOO_LARGE)]
    assert peak < 8 * MEBIBYTE


def test_a_50_mb_line_is_read_within_a_few_times_its_size(tmp_path: Path) -> None:
    text = "0123456789abcdef" * (50_000_000 // 16)
    path = tmp_path / "part.jsonl"
    path.write_bytes(line("a") + b"\n" + line(text) + b"\n" + line("b") + b"\n")
    tracemalloc.start()
    try:
        sizes = [len(e.messages[-1]["content"]) for e in read_completions(path, file="f") if isinstance(e, Completion)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        skipped = outcomes(list(read_completions(path, file="f", limits=ReadLimits(max_record_bytes=MEBIBYTE))))
        peak_skipped = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [1, len(text), 1]
    assert peak < 4 * len(text)
    assert skipped == [(1, "a"), (2, Reason.RECORD_TOO_LARGE), (3, "b")]
    assert peak_skipped < 8 * MEBIBYTE


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl.gz"
    path.write_bytes(gzip.compress((line("x" * 10_000) + b"\n") * 3000, compresslevel=1, mtime=0))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_completions(path, file="f")) == 3000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MEBIBYTE


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.builds(
    lambda text, tool, kwargs, ascii_only: (record(text, tools=[tool], chat_template_kwargs=kwargs), ascii_only),
    st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and "think>" not in text),
    st.dictionaries(st.text(max_size=4), JSON_VALUES, min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=2),
    st.booleans(),
)
BLANKS = st.lists(st.sampled_from([b"\n", b"\r\n", b" \t\n"]), max_size=2).map(b"".join)
ENDINGS = st.sampled_from([b"\n", b"\r\n", b" \r\n"])
FILES = st.lists(st.tuples(BLANKS, RECORDS, ENDINGS), max_size=6)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def lay_out(file: list[tuple[bytes, tuple[dict[str, Any], bool], bytes]]) -> tuple[bytes, list[tuple[int, int]]]:
    """The bytes of a file and each record's line and byte offset."""
    data, positions = b"", []
    for blanks, (value, ascii_only), ending in file:
        data += blanks
        positions.append((data.count(b"\n") + 1, len(data)))
        data += json.dumps(value, ensure_ascii=ascii_only).encode() + ending
    return data, positions


@QUICK
@given(file=FILES, suffix=st.sampled_from(FORMATS), whole=st.booleans())
def test_what_was_written_is_read(tmp_path: Path, file: Any, suffix: str, *, whole: bool) -> None:
    data, positions = lay_out(file)
    data = data if whole else data.rstrip(b" \r\n")
    entries = read(tmp_path, compress(data, suffix), suffix)
    assert all(isinstance(entry, Completion) for entry in entries)
    assert [(entry.line, entry.byte_offset) for entry in entries] == positions
    for entry, (_, (value, _), _) in zip(entries, file, strict=True):
        assert isinstance(entry, Completion)
        assert entry.messages == value["messages"]
        assert repr(entry.tools) == repr(value["tools"])
        assert repr(entry.chat_template_kwargs) == repr(value["chat_template_kwargs"])


@QUICK
@given(file=FILES.filter(len), where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_one_wrong_byte_costs_at_most_the_lines_it_touches(tmp_path: Path, file: Any, where: float, byte: int) -> None:
    data, _ = lay_out(file)
    at = int(where * len(data))
    damaged = data[:at] + bytes([byte]) + data[at + 1 :]
    touched = data[:at].count(b"\n") + 1
    joined = (1 if data[at] == 0x0A else 0) - (1 if byte == 0x0A else 0)  # lines that the byte joins or splits
    before = {e.line: e.messages for e in read(tmp_path, data) if isinstance(e, Completion)}
    after = {e.line: e.messages for e in read(tmp_path, damaged) if isinstance(e, Completion)}
    for number, messages in before.items():
        if number < touched:
            assert after[number] == messages
        elif number > touched + max(joined, 0):
            assert after[number - joined] == messages


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *rb'{ } [ ] : , " a \ u d83d \ud83d \ude00 1 e - . 0 true NaN {"a": "b" \u0061'.split(),
                *(b" ", b"\xc3\xa9", b"\xff"),
            ]
        ),
        max_size=12,
    ).map(b"".join)
)
def test_the_fast_parser_accepts_what_the_reference_accepts(data: bytes) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
        json.dumps(expected, ensure_ascii=False).encode()
    except ValueError:
        with pytest.raises(RecordError):
            parse_json(data)
    else:
        assert repr(parse_json(data)) == repr(expected)


def test_lines_across_chunks(tmp_path: Path) -> None:
    rows = [b"x" * size for size in (0, 1, (1 << 18) - 2, 1 << 18, (1 << 18) + 1, 3 << 18, 5)]
    path = tmp_path / "part.jsonl"
    path.write_bytes(b"\n".join(rows))
    with path.open("rb") as file:
        lines = list(iter_lines(file, path.name, ReadLimits()))
    assert [entry.data for entry in lines] == rows
    assert [entry.ending for entry in lines] == ["newline"] * 6 + ["end"]
