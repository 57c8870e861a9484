"""Ids and mask of records of every kind, against an oracle that knows what was sampled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash.config import TokenizeOptions
from dflash.data.completions import normalise_record
from dflash.data.encoders import HuggingFaceEncoder
from dflash.data.records import Completion
from dflash.data.rows import RowFlag
from dflash.data.sampled import check_ids
from dflash.data.scripts import dominant_script
from dflash.data.tokenize import TokenizedBatch, tokenize_batch, tokenize_completion
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import RecordError

PIECES = ["word", " two", "\n", "\n\n", "  ", "é", "नमस्ते", "漢字", "\u3000", "12345", "<|im_end|>", "<|eot_id|>"]
PIECES += ["<|im_start|>assistant\n", "<b>", "{}", "x = 1;", "🙂", "\r\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def _answers(draw: st.DrawFn) -> str:
    return f"{draw(TEXTS)}x{draw(TEXTS)}"  # white space may surround it, but it isn't empty


def _encode(tokenizer: TargetTokenizer, text: str, *, allow_special: bool) -> list[int]:
    backend = tokenizer.backend
    backend.encode_special_tokens = not allow_special
    ids = backend.encode(text, add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return list(ids)


def _batch(record: dict[str, Any], tokenizer: TargetTokenizer, **options: Any) -> TokenizedBatch:
    encoder = HuggingFaceEncoder(tokenizer.backend)
    return tokenize_batch([normalise_record(record)], tokenizer, TokenizeOptions(**options), encoder)


def _record(answer: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer}
    if "reasoning_content" in fields:
        message["reasoning_content"] = fields.pop("reasoning_content")
    return {"messages": [{"role": "user", "content": "q?"}, message], **fields}


def _assert_row(batch: TokenizedBatch, prompt: list[int], sampled: list[int]) -> None:
    assert batch.rejects == []
    assert batch.rows.ids.tolist() == prompt + sampled
    assert batch.rows.mask.tolist() == [False] * len(prompt) + [True] * len(sampled)
    assert batch.rows.num_loss_tokens.tolist() == [len(sampled)]


def _check_sampled(
    tokenizer: TargetTokenizer, record: dict[str, Any], *, prompt: str, body: str, terminator: str
) -> None:
    """The row holds the prompt as a server encodes it, the body without control tokens, and the terminator."""
    sampled = _encode(tokenizer, body, allow_special=False)
    if record["finish_reason"] == "stop":
        sampled.append(tokenizer.controls.ids[terminator])
    if len(sampled) >= 2:
        _assert_row(_batch(record, tokenizer), _encode(tokenizer, prompt, allow_special=True), sampled)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_mask_covers_exactly_the_sampled_tokens_llama3_like(llama3_like: TargetTokenizer, finish_reason: str) -> None:
    @FEW
    @given(question=TEXTS, answer=_answers())
    def check(question: str, answer: str) -> None:
        record = _record(answer, finish_reason=finish_reason)
        record["messages"][0]["content"] = question
        start, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
        prompt = f"<|begin_of_text|>{start}user{end}{question.strip()}<|eot_id|>{start}assistant{end}"
        _check_sampled(llama3_like, record, prompt=prompt, body=answer.strip(), terminator="<|eot_id|>")

    check()


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_mask_covers_exactly_the_sampled_tokens_smollm2(smollm2: TargetTokenizer, finish_reason: str) -> None:
    @FEW
    @given(question=TEXTS, answer=_answers())
    def check(question: str, answer: str) -> None:
        record = _record(answer, finish_reason=finish_reason)
        record["messages"][0]["content"] = question
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        turns = [f"<|im_start|>system\n{system}<|im_end|>\n", f"<|im_start|>user\n{question}<|im_end|>\n"]
        prompt = "".join(turns) + "<|im_start|>assistant\n"
        _check_sampled(smollm2, record, prompt=prompt, body=answer, terminator="<|im_end|>")

    check()


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("thinks", [True, False])
def test_mask_covers_exactly_the_sampled_tokens_chatml(
    chatml: TargetTokenizer, finish_reason: str, *, thinks: bool
) -> None:
    @FEW
    @given(trace=_answers(), answer=_answers())
    def check(trace: str, answer: str) -> None:
        fields = {"reasoning_content": trace} if thinks else {}
        record = _record(answer, finish_reason=finish_reason, **fields)
        prompt = "<|im_start|>user\nq?<|im_end|>\n<|im_start|>assistant\n"
        prompt += "" if thinks else "<think>\n\n</think>\n\n"
        body = f"<think>\n{trace}\n</think>\n\n{answer}" if thinks else answer
        _check_sampled(chatml, record, prompt=prompt, body=body, terminator="<|im_end|>")

    check()


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("kind", ["trace and answer", "trace", "answer"])
def test_mask_covers_exactly_the_sampled_tokens_qwen36(qwen36: TargetTokenizer, finish_reason: str, kind: str) -> None:
    if (finish_reason, kind) == ("stop", "trace"):  # whether the closing tag was sampled is the template's guess
        return

    @FEW
    @given(trace=_answers(), answer=_answers())
    def check(trace: str, answer: str) -> None:
        fields = {"reasoning_content": trace} if "trace" in kind else {}
        record = _record(answer if "answer" in kind else "", finish_reason=finish_reason, **fields)
        opened = "<think>\n" if "trace" in kind else "<think>\n\n</think>\n\n"
        prompt = f"<|im_start|>user\nq?<|im_end|>\n<|im_start|>assistant\n{opened}"
        closed = f"{trace.strip()}\n</think>\n\n{answer.strip()}"
        body = {"trace and answer": closed, "trace": trace.strip(), "answer": answer.strip()}[kind]
        _check_sampled(qwen36, record, prompt=prompt, body=body, terminator="<|im_end|>")

    check()


@given(answer=_answers(), window=st.integers(8, 60))
@FEW
def test_window_cuts_ids_and_mask_on_the_right(smollm2: TargetTokenizer, answer: str, window: int) -> None:
    whole = _batch(_record(answer), smollm2).rows
    cut = _batch(_record(answer), smollm2, max_seq_len=window)
    prompt = int(whole.mask.argmax())
    if window >= len(whole.ids):
        assert cut.rows.ids.tolist() == whole.ids.tolist()
        assert not cut.rows.flags[0] & RowFlag.WINDOW_CUT
    elif window >= prompt + 2:
        assert cut.rows.ids.tolist() == whole.ids[:window].tolist()
        assert cut.rows.mask.tolist() == whole.mask[:window].tolist()
        assert cut.rows.flags[0] & RowFlag.WINDOW_CUT
    else:
        reason = "too_few_loss_tokens" if window > prompt else "no_loss_tokens_within_max_seq_len"
        assert [reject.reason for reject in cut.rejects] == [reason]
        assert cut.rows.num_rows == 0


def test_prompt_that_can_not_fit_is_dropped_unencoded(qwen36: TargetTokenizer) -> None:
    record = _record("an answer")
    record["messages"][0]["content"] = "a" * 3_000_000  # encoding it would take a minute
    batch = _batch(record, qwen36, max_seq_len=64)
    assert [reject.reason for reject in batch.rejects] == ["no_loss_tokens_within_max_seq_len"]
    assert "bytes" in batch.rejects[0].message


def test_sampled_ids_are_used_as_they_are(smollm2: TargetTokenizer) -> None:
    """'ab' as two tokens: the target may sample what encoding its text would never give."""
    two = [smollm2.backend.token_to_id("a"), smollm2.backend.token_to_id("b")]
    assert _encode(smollm2, "ab", allow_special=True) != two
    sampled = [*two, 2]
    prompt_text = smollm2.template.render([{"role": "user", "content": "q?"}], None, {}, add_generation_prompt=True)
    prompt = _encode(smollm2, prompt_text, allow_special=True)
    record = _record("ab", output_token_ids=sampled, output_tokens=3)
    _assert_row(_batch(record, smollm2), prompt, sampled)
    with_prompt = {**record, "prompt_token_ids": [5, 6, 7]}
    _assert_row(_batch(with_prompt, smollm2), [5, 6, 7], sampled)
    assert _batch(with_prompt, smollm2).rows.flags[0] == RowFlag.SAMPLED_IDS


def test_sampled_ids_of_another_tokenizer_are_refused(smollm2: TargetTokenizer) -> None:
    record = _record("Hello there", output_token_ids=[5000, 6000, 2])
    batch = _batch(record, smollm2)
    assert [reject.reason for reject in batch.rejects] == ["sampled_ids_mismatch"]


@pytest.mark.parametrize("field", ["output_token_ids", "prompt_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(smollm2: TargetTokenizer, field: str) -> None:
    batch = _batch(_record("a", **{field: [1, 49152]}), smollm2)
    assert [reject.reason for reject in batch.rejects] == ["bad_field"]
    assert field in batch.rejects[0].message
    assert "49151" in batch.rejects[0].message


@pytest.mark.parametrize("ids", [[1, -1], [1, 10], [1, 10**30], [1, True], [1, 2.0], [1, None]])
def test_only_integers_of_the_vocabulary_are_ids(ids: list[Any]) -> None:
    check_ids("ids", [0, 9], range(10))
    with pytest.raises(
        RecordError, match="bad_field: ids: expected token ids of the target's vocabulary, 10 from 0 to 9"
    ):
        check_ids("ids", ids, range(10))


@pytest.mark.parametrize("field", ["output_token_ids", "prompt_token_ids"])
def test_ids_in_a_gap_of_the_vocabulary_are_refused(gapped: TargetTokenizer, field: str) -> None:
    record = _record("yes", **{"output_token_ids": [1, 5], field: [1, 3, 5]})
    rejects = _batch(record, gapped).rejects
    assert [(reject.reason, field in reject.message, "found int 3" in reject.message) for reject in rejects] == [
        ("bad_field", True, True)
    ]
    assert _batch(_record("yes", output_token_ids=[1, 5]), gapped).rejects == []


def test_sampled_ids_need_no_render_of_the_response(smollm2: TargetTokenizer) -> None:
    """SmolLM2's template drops a trace; the record's ids have it."""
    ids = [*_encode(smollm2, "thought</think>answer", allow_special=True), 2]
    record = _record("answer", reasoning_content="thought", output_token_ids=ids)
    assert _batch(record, smollm2).rows.num_loss_tokens.tolist() == [len(ids)]
    del record["output_token_ids"]
    assert [reject.reason for reject in _batch(record, smollm2).rejects] == ["template_error"]


def test_half_a_character_is_fine_only_where_the_response_was_cut(smollm2: TargetTokenizer) -> None:
    ids = _encode(smollm2, "ok \U0001f9ff", allow_special=True)[:-1]
    for finish_reason, undecodable in (("length", False), ("stop", True)):
        record = _record("ok", finish_reason=finish_reason, output_token_ids=ids)
        flags = _batch(record, smollm2).rows.flags[0]
        assert bool(flags & RowFlag.UNDECODABLE) == undecodable


def test_flags(qwen36: TargetTokenizer) -> None:
    def flags(record: dict[str, Any]) -> RowFlag:
        return RowFlag(int(_batch(record, qwen36).rows.flags[0]))

    assert flags(_record("an answer", output_tokens=3)) == 0
    assert flags(_record("an answer", output_tokens=900)) == RowFlag.OUTPUT_MISMATCH
    assert flags(_record("an answer", finish_reason="length")) == RowFlag.LENGTH_CUT
    trace_alone = _record("", reasoning_content="a long thought", finish_reason="length")
    assert flags(trace_alone) == RowFlag.LENGTH_CUT | RowFlag.THINKING_ONLY
    untrimmed = _record("\n\nok \n", reasoning_content="\n r \n", output_tokens=7)
    assert flags(untrimmed) == RowFlag.OUTPUT_MISMATCH | RowFlag.VERBATIM_WHITESPACE


def test_rows_keep_order_and_rejects_keep_their_place(smollm2: TargetTokenizer) -> None:
    records = [_record("one two three", id="a", source="s"), _record("", id="b"), _record("four five six")]
    call = {"function": {"name": "f", "arguments": {}}}
    records[1]["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
    completions = [
        normalise_record(record, file="f.jsonl", line=number, byte_offset=number * 10)
        for number, record in enumerate(records, start=1)
    ]
    batch = tokenize_batch(completions, smollm2, TokenizeOptions(), HuggingFaceEncoder(smollm2.backend))
    assert batch.rows.sample_ids == ["a", "f.jsonl:3"]
    assert batch.rows.sources == ["s", ""]
    assert batch.encoder == "huggingface"
    reject = batch.rejects[0]
    assert (reject.file, reject.line, reject.byte_offset, reject.id) == ("f.jsonl", 2, 20, "b")
    assert reject.reason == "template_error"


def test_empty_batch(smollm2: TargetTokenizer) -> None:
    batch = tokenize_batch([], smollm2, TokenizeOptions(), HuggingFaceEncoder(smollm2.backend))
    assert (batch.rows.num_rows, batch.rejects, batch.rows.ids.dtype) == (0, [], np.int32)


def test_loss_on_all_turns_after_the_last_query(smollm2: TargetTokenizer) -> None:
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "before the last query"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "first part"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "second part"},
    ]
    rows = _batch({"messages": messages}, smollm2, loss_on="all_turns").rows
    text = smollm2.backend.decode(rows.ids[rows.mask].tolist(), skip_special_tokens=False)
    assert text == "first part<|im_end|>second part<|im_end|>"
    last = _batch({"messages": messages}, smollm2).rows
    assert smollm2.backend.decode(last.ids[last.mask].tolist(), skip_special_tokens=False) == "second part<|im_end|>"
    assert rows.ids.tolist() == last.ids.tolist()


def test_no_space_is_put_in_front_of_a_response(sentencepiece_like: TargetTokenizer, smollm2: TargetTokenizer) -> None:
    """Such a tokenizer gives a text of its own a first space, which a response that follows a prompt doesn't have."""
    assert sentencepiece_like.lead
    assert not smollm2.lead
    rows = _batch(_record("the answer"), sentencepiece_like).rows
    whole = "<|user|>\nq?</s><|assistant|>\nthe answer</s>"
    assert rows.ids.tolist() == sentencepiece_like.backend.encode(whole, add_special_tokens=False).ids
    assert sentencepiece_like.backend.id_to_token(int(rows.ids[rows.mask][0]))[0] != "▁"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.sampled_from([*PIECES, "", "\ud800", "user", "</think>"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "type", "function", "name", "arguments", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
HOSTILE_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
    optional=dict.fromkeys(("content", "reasoning_content", "tool_calls", "name"), VALUES),
)


@given(data=st.data())
@settings(FEW, max_examples=100)
def test_hostile_records_become_a_row_or_a_reject(
    smollm2: TargetTokenizer, chatml: TargetTokenizer, qwen36: TargetTokenizer, data: st.DataObject
) -> None:
    last = HOSTILE_MESSAGES | st.just({"content": "ok then", "reasoning_content": data.draw(VALUES)})
    completion = Completion(
        id=None,
        messages=[*data.draw(st.lists(HOSTILE_MESSAGES, max_size=3)), {**data.draw(last), "role": "assistant"}],
        tools=data.draw(st.none() | st.lists(VALUES, max_size=2)),
        finish_reason=data.draw(st.sampled_from([None, "stop", "length"])),
        output_tokens=data.draw(st.none() | st.integers(0, 10**12)),
        chat_template_kwargs=data.draw(
            st.dictionaries(st.sampled_from(["enable_thinking", "bos_token", "tools", "x"]), VALUES, max_size=2)
        ),
        prompt_token_ids=None,
        output_token_ids=data.draw(st.none() | st.lists(st.integers(-1, 60_000), min_size=1, max_size=4)),
        source=None,
        model=None,
        file="f",
        line=1,
        byte_offset=0,
    )
    for tokenizer in (smollm2, chatml, qwen36):
        batch = tokenize_batch([completion], tokenizer, TokenizeOptions(), HuggingFaceEncoder(tokenizer.backend))
        assert batch.rows.num_rows + len(batch.rejects) == 1
        assert len(batch.rows.ids) == len(batch.rows.mask) == batch.rows.offsets[-1]
        assert (batch.rows.num_loss_tokens >= 2).all()


def test_transformers_tokenizer_is_taken_as_it_is(
    llama3_like_tokenizer: PreTrainedTokenizerFast, llama3_like: TargetTokenizer
) -> None:
    record = _record("an answer")
    assert tokenize_completion(record, llama3_like_tokenizer) == tokenize_completion(record, llama3_like)


def test_threads_share_a_transformers_tokenizer(llama3_like_tokenizer: PreTrainedTokenizerFast) -> None:
    """An answer that spells control tokens is encoded with another setting of the backend than one that doesn't."""
    plain, spelling = _record("yes. " * 300), _record("yes. " * 300 + "<|eot_id|> no")
    expected = [tokenize_completion(record, llama3_like_tokenizer) for record in (plain, spelling)]

    def run(index: int) -> bool:
        records = [plain, spelling] * 15 if index % 2 else [spelling, plain] * 15
        found = [tokenize_completion(record, llama3_like_tokenizer) for record in records]
        return found == (expected * 15 if index % 2 else expected[::-1] * 15)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [True] * 4


def test_unusable_records_give_none(smollm2: TargetTokenizer) -> None:
    assert tokenize_completion({"messages": 3}, smollm2) is None
    assert tokenize_completion(_record(""), smollm2) is None


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("plain", "latin"),
        ("123 !?", "none"),
        ("", "none"),
        ("ça va très bien", "latin"),
        ("漢字 ok", "han"),
        ("これは日本語の文章です", "kana"),
        ("Привет, мир", "cyrillic"),
        ("नमस्ते", "indic"),
        ("안녕하세요", "hangul"),
        ("مرحبا", "arabic"),
        ("🙂🙂", "none"),
    ],
)
def test_dominant_script(text: str, script: str) -> None:
    assert dominant_script(text) == script


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(st.sampled_from("aé漢 .\ud800🙂я"), min_size=1, max_size=4), st.integers(1, 600)),
        max_size=5,
    )
)
def test_latin_is_found_as_counting_finds_it(runs: list[tuple[str, int]]) -> None:
    """Few letters mostly decide; where they don't, all of the first 4,096 characters do."""
    text = "".join(piece * count for piece, count in runs)
    head = text[:4096]
    ascii_letters = sum(character.isascii() and character.isalpha() for character in head)
    if ascii_letters > sum(not character.isascii() for character in head):
        assert dominant_script(text) == "latin"
    other = head.translate({ord(character): None for character in "aé"})
    if dominant_script(text) == "latin" and not head.isascii():
        counts = [sum(character in script for character in other) for script in ("漢", "я")]
        assert max(counts) <= head.count("a") + head.count("é")
