"""Bulk path = one-record path = Hugging Face's ids, on every real record at hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from dflash.config import TokenizeOptions
from dflash.data.chat import template_messages
from dflash.data.completions import read_completions
from dflash.data.encoders import HuggingFaceEncoder
from dflash.data.records import Completion
from dflash.data.rows import RowFlag
from dflash.data.tokenize import tokenize_batch, tokenize_completion
from dflash.data.tokenizer import TargetTokenizer

LONGEST = TokenizeOptions(max_seq_len=1_048_576)


def _read(folder: Path, pattern: str = "*.jsonl") -> list[Completion]:
    entries = itertools.chain.from_iterable(
        read_completions(path, file=path.name) for path in sorted(folder.glob(pattern))
    )
    return [entry for entry in entries if isinstance(entry, Completion)]


@pytest.fixture(scope="module")
def conversations(shared_data: Path) -> list[Completion]:
    return _read(shared_data / "reasoning_messages")


@pytest.fixture(scope="module")
def examples(example_completions: Path) -> list[Completion]:
    found = _read(example_completions, "part-*.jsonl*") if example_completions.is_dir() else []
    if not found:
        pytest.skip("the example completions are not in this checkout yet")
    return found


def _assert_paths_agree(completions: list[Completion], tokenizer: TargetTokenizer) -> None:
    reference = tokenize_batch(completions, tokenizer, LONGEST, HuggingFaceEncoder(tokenizer.backend))
    assert reference.rejects == []
    bulk = tokenize_batch(completions, tokenizer, LONGEST)
    assert bulk.rows.ids.tolist() == reference.rows.ids.tolist()
    assert bulk.rows.mask.tolist() == reference.rows.mask.tolist()
    for index, completion in enumerate(completions):
        row = bulk.rows.part(index, index + 1)
        one = tokenize_completion(completion, tokenizer, max_seq_len=LONGEST.max_seq_len)
        assert one == {"input_ids": row.ids.tolist(), "loss_mask": row.mask.tolist()}


def test_qwen36_on_real_conversations(conversations: list[Completion], qwen36: TargetTokenizer) -> None:
    assert len(conversations) == 100
    _assert_paths_agree(conversations, qwen36)


def test_smollm2_on_all_examples(examples: list[Completion], smollm2: TargetTokenizer) -> None:
    """With the ids that were sampled, and, where only the texts are there, with encoded ones."""
    assert len(examples) > 1000
    for start in range(0, len(examples), 300):
        batch = examples[start : start + 300]
        _assert_paths_agree(batch, smollm2)
        _assert_paths_agree([replace(one, prompt_token_ids=None, output_token_ids=None) for one in batch], smollm2)


def test_qwen36_ids_are_those_of_apply_chat_template(
    conversations: list[Completion], qwen36: TargetTokenizer, qwen36_dir: Path
) -> None:
    """Behind the end-of-turn token the whole render has one newline more; a cut response has no such token.

    Where the trace is empty the whole render joins the newlines on both sides of the prompt's end to one token, which
    no server prefilled: there only the text is equal.
    """
    num_empty_traces = 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(qwen36_dir)
    bulk = tokenize_batch(conversations, qwen36, LONGEST, HuggingFaceEncoder(qwen36.backend))
    for index, completion in enumerate(conversations):
        whole = tokenizer.apply_chat_template(
            template_messages(completion.messages), tools=completion.tools, tokenize=True, return_dict=True
        )["input_ids"]
        ids = bulk.rows.part(index, index + 1).ids.tolist()
        cut = completion.finish_reason == "length"
        assert (ids[-1] == qwen36.eos_token_id) != cut
        if completion.messages[-1].get("reasoning_content") == "":
            num_empty_traces += 1
            assert ids != whole[:-1]
            assert tokenizer.decode(ids) == tokenizer.decode(whole[:-1])
        else:
            assert ids == (whole[: len(ids)] if cut else whole[:-1])
    assert num_empty_traces == 4


def test_examples_render_to_the_ids_that_were_sampled(examples: list[Completion], smollm2: TargetTokenizer) -> None:
    """The rendered prompt is the one that the sampling script prefilled, and the mask is what it counted."""
    batch = tokenize_batch(examples, smollm2, LONGEST, HuggingFaceEncoder(smollm2.backend))
    assert batch.rejects == []
    rows = batch.rows
    assert (rows.num_loss_tokens == rows.output_tokens).all()
    assert not (rows.flags & (RowFlag.OUTPUT_MISMATCH | RowFlag.UNDECODABLE)).any()
    for index, completion in enumerate(examples):
        row = rows.part(index, index + 1)
        assert row.ids[row.mask].tolist() == completion.output_token_ids
        if completion.prompt_token_ids:
            prompt = smollm2.template.render(
                template_messages(completion.messages[:-1]), completion.tools, {}, add_generation_prompt=True
            )
            assert smollm2.backend.encode(prompt, add_special_tokens=False).ids == completion.prompt_token_ids
