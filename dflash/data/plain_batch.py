"""Ids and masks of plain rows, column by column: what `tokenize` does row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dflash.config import TokenizeOptions
from dflash.data.encoders import Encoder, Ids
from dflash.data.plain_rows import plan_generally, script_of
from dflash.data.records import Reject, sample_id_of
from dflash.data.row_plan import prompt_too_long, too_few_loss_tokens
from dflash.data.rows import INT32_MAX, BatchPart, RowFlag, TokenizedRows, offsets_of

if TYPE_CHECKING:
    from dflash.data._plain_rows import PlainRow
    from dflash.data.tokenizer import TargetTokenizer

Counts = npt.NDArray[np.int64]


def tokenize_plain_rows(
    rows: Mapping[int, PlainRow], tokenizer: TargetTokenizer, options: TokenizeOptions, encoder: Encoder | None
) -> BatchPart:
    """Tokenize plain rows, given by their places in the batch, with one encode call for all their texts.

    Raises:
        TokenizerError: a row that is made the general way too came out otherwise, or a fast encoder gives other ids
            than the reference.
    """
    planned = list(rows.values())
    tokenizer.turn_programs.note_replays(len(planned))
    checked = next((row for row in planned if row.data is not None), None)
    if checked is not None:
        plan_generally(checked, tokenizer, options)
    texts = [text for row in planned for text in (row.prompt, row.response)]
    encoder = encoder or tokenizer.encoder_for(texts).encoder
    ids, bounds = encoder.encode_batch_flat(texts, allow_special=True)
    sizes = np.diff(bounds)
    prompts, sampled = sizes[::2], sizes[1::2]
    lengths = np.minimum(prompts + sampled, options.max_seq_len)
    loss = lengths - prompts
    counted = [-1 if row.output_tokens is None else row.output_tokens for row in planned]
    output_tokens = np.minimum(np.array(counted, np.int64), INT32_MAX)
    flags = np.where([row.is_thinking_only for row in planned], RowFlag.THINKING_ONLY, RowFlag(0))
    flags[lengths < prompts + sampled] |= RowFlag.WINDOW_CUT
    is_mismatch = (output_tokens >= 0) & (output_tokens != sampled)
    flags[is_mismatch] |= RowFlag.OUTPUT_MISMATCH
    is_kept = (prompts < options.max_seq_len) & (loss >= options.min_loss_tokens)
    kept = np.flatnonzero(is_kept).tolist()
    doubtful = [index for index in kept if is_mismatch[index] and planned[index].data is not None]
    sizes_verbatim = _verbatim_sizes([planned[index] for index in doubtful], tokenizer, options, encoder)
    for index, size in zip(doubtful, sizes_verbatim, strict=True):
        if size == planned[index].output_tokens:
            flags[index] |= RowFlag.VERBATIM_WHITESPACE
    used = [planned[index] for index in kept]
    numbers = list(rows)
    return BatchPart(
        rows=TokenizedRows(
            ids=_ranges(ids, bounds[:-1:2][is_kept], lengths[is_kept]),
            offsets=offsets_of(lengths[is_kept]),
            mask=_mask(prompts[is_kept], loss[is_kept]),
            sample_ids=[sample_id_of(row) for row in used],
            sources=[row.source or "" for row in used],
            num_loss_tokens=loss[is_kept].astype(np.int32),
            output_tokens=output_tokens[is_kept].astype(np.int32),
            finish_reasons=[row.finish_reason or "" for row in used],
            flags=flags[is_kept].astype(np.uint16),
            scripts=[script_of(row) for row in used],
        ),
        numbers=[numbers[index] for index in kept],
        rejects={
            numbers[index]: _reject(planned[index], int(prompts[index]), int(loss[index]), options)
            for index in np.flatnonzero(~is_kept).tolist()
        },
        encoder=encoder.name,
    )


def _verbatim_sizes(
    rows: Sequence[PlainRow], tokenizer: TargetTokenizer, options: TokenizeOptions, encoder: Encoder
) -> list[int]:
    """Tokens of each response if white space that the template trimmed was sampled; -1 where none was trimmed."""
    plans = [plan_generally(row, tokenizer, options) for row in rows]
    texts = [plan.verbatim.text for plan in plans if plan.verbatim is not None]
    sizes = iter(np.diff(encoder.encode_batch_flat(texts, allow_special=True)[1]).tolist() if texts else ())
    return [-1 if plan.verbatim is None else next(sizes) for plan in plans]


def _reject(row: PlainRow, num_prompt_tokens: int, num_loss_tokens: int, options: TokenizeOptions) -> Reject:
    if num_prompt_tokens >= options.max_seq_len:
        return Reject.of(row, prompt_too_long(f"{num_prompt_tokens} tokens", options))
    return Reject.of(row, too_few_loss_tokens(num_loss_tokens, options))


def _ranges(ids: Ids, starts: Counts, lengths: Counts) -> Ids:
    """Ranges of the ids behind one another, without a copy where they are all of them."""
    if int(lengths.sum()) == len(ids):
        return ids
    return np.concatenate([ids[:0], *(ids[start:end] for start, end in zip(starts, starts + lengths, strict=True))])


def _mask(prompts: Counts, loss: Counts) -> npt.NDArray[np.bool_]:
    """For each row as many False as its prompt has tokens, then as many True as are inside the loss."""
    is_loss = np.tile(np.array([False, True]), len(prompts))
    return np.repeat(is_loss, np.stack([prompts, loss], axis=1).ravel())
