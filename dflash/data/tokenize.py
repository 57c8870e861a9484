"""From completions to ids and loss mask: one record, or a batch as flat buffers. Both take the same path."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dflash.config import TokenizeOptions
from dflash.data.completions import normalise_record
from dflash.data.encoders import Encoder, HuggingFaceEncoder, Ids
from dflash.data.plain_batch import tokenize_plain_rows
from dflash.data.records import Completion, Reject
from dflash.data.row_plan import RowPlan, Segment, plan_row, prompt_too_long, require_unicode, too_few_loss_tokens
from dflash.data.rows import INT32_MAX, BatchPart, RowFlag, TokenizedRows, offsets_of, put_in_order
from dflash.data.scripts import dominant_script
from dflash.data.tokenizer import TargetTokenizer, adapt_tokenizer
from dflash.errors import RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash.data._plain_rows import PlainRow


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """Rows of a batch, in the order of its completions, and what was left out.

    Attributes:
        rows: the rows.
        rejects: one for each completion without a row.
        encoder: name of the encoder that made the ids.
    """

    rows: TokenizedRows
    rejects: list[Reject]
    encoder: str


def tokenize_completion(
    completion: Completion | Mapping[str, Any],
    tokenizer: TargetTokenizer | PreTrainedTokenizerBase,
    max_seq_len: int = 8192,
) -> dict[str, list[Any]] | None:
    """Tokenize one completion.

    Args:
        completion: a record as in a completions file, or one that was read from there.
        tokenizer: the target's, from `load_tokenizer` or transformers.
        max_seq_len: longest row in tokens; a longer one is cut on the right.

    Returns:
        `input_ids` and `loss_mask` (true where the target sampled the token), equally long; None if the record can't
        be used. `tokenize_batch` says why.

    Raises:
        TokenizerError: the tokenizer can't be used.
    """
    target = tokenizer if isinstance(tokenizer, TargetTokenizer) else adapt_tokenizer(tokenizer)
    try:
        record = completion if isinstance(completion, Completion) else normalise_record(completion)
    except RecordError:
        return None
    options = TokenizeOptions(max_seq_len=max_seq_len)
    rows = tokenize_batch([record], target, options, HuggingFaceEncoder(target.backend)).rows
    if rows.num_rows == 0:
        return None
    return {"input_ids": rows.ids.tolist(), "loss_mask": rows.mask.tolist()}


def tokenize_batch(
    entries: Sequence[Completion | PlainRow],
    tokenizer: TargetTokenizer,
    options: TokenizeOptions,
    encoder: Encoder | None = None,
) -> TokenizedBatch:
    """Tokenize completions and rows of plain ones, the texts of either with one encode call.

    Args:
        entries: normalised records, and rows of plain ones.
        tokenizer: the target's.
        options: decide ids and mask.
        encoder: makes the ids; by default the tokenizer's choice.

    Raises:
        TokenizerError: a fast encoder was found to give other ids than the reference, or native code another row than
            Python.
    """
    completions: dict[int, Completion] = {}
    plain_rows: dict[int, PlainRow] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, Completion):
            completions[number] = entry
        else:
            plain_rows[number] = entry
    parts: list[BatchPart] = []
    if plain_rows:
        parts.append(tokenize_plain_rows(plain_rows, tokenizer, options, encoder))
    if completions or not plain_rows:
        parts.append(_tokenize_completions(completions, tokenizer, options, encoder))
    rejects = {number: reject for part in parts for number, reject in part.rejects.items()}
    return TokenizedBatch(put_in_order(parts), [rejects[number] for number in sorted(rejects)], parts[0].encoder)


def _tokenize_completions(
    completions: Mapping[int, Completion], tokenizer: TargetTokenizer, options: TokenizeOptions, encoder: Encoder | None
) -> BatchPart:
    rejects: dict[int, Reject] = {}
    plans: dict[int, tuple[Completion, RowPlan]] = {}
    for number, completion in completions.items():
        try:
            plans[number] = (completion, plan_row(completion, tokenizer, options))
        except RecordError as error:
            rejects[number] = Reject.of(completion, error)
    encoder, encoded = _encode_plans(plans, tokenizer, encoder, rejects)
    rows: dict[int, _Row] = {}
    first = 0
    for number, (completion, plan) in plans.items():
        last = first + len(plan.segments)
        try:
            rows[number] = _row(completion, plan, encoded.bounds[first : last + 1], options)
        except RecordError as error:
            rejects[number] = Reject.of(completion, error)
        first = last
    kept = list(rows.values())
    _flag_verbatim(kept, encoder, tokenizer.lead)
    return BatchPart(_join(kept, encoded.ids), list(rows), rejects, encoder.name)


@dataclass(slots=True)
class _Encoded:
    """Ids of segments, joined: int32 [t], and segment i is ids[bounds[i]:bounds[i + 1]]."""

    ids: Ids
    bounds: list[int]


@dataclass(slots=True)
class _Row:
    completion: Completion
    plan: RowPlan
    start: int  # in the ids of all segments
    end: int  # inside the window
    spans: list[tuple[int, int]]  # of the loss, apart from one another, inside the window, from the row's start
    num_sampled_tokens: int  # of the last response, before the window's cut
    flags: RowFlag


def _encode_plans(
    plans: dict[int, tuple[Completion, RowPlan]],
    tokenizer: TargetTokenizer,
    encoder: Encoder | None,
    rejects: dict[int, Reject],
) -> tuple[Encoder, _Encoded]:
    """Encode all segments; a plan whose text is no valid Unicode goes from `plans` to `rejects`.

    Records from files can't hold such text. Looking for it in every text costs as much as a tenth of all work, and
    encoders refuse it anyway.
    """
    segments = [segment for _, plan in plans.values() for segment in plan.segments]
    try:
        encoder = encoder or tokenizer.encoder_for([segment.text for segment in segments]).encoder
        return encoder, _encode(segments, encoder, tokenizer.lead)
    except (UnicodeEncodeError, TypeError):  # the latter from the reference
        before = len(plans)
        for number, (completion, plan) in tuple(plans.items()):
            try:
                require_unicode(plan)
            except RecordError as error:
                del plans[number]
                rejects[number] = Reject.of(completion, error)
        if len(plans) == before:
            raise
    return _encode_plans(plans, tokenizer, encoder, rejects)


def _encode(segments: Sequence[Segment], encoder: Encoder, lead: Sequence[int]) -> _Encoded:
    """Encode segments; two calls at most, one with control tokens recognised and one without.

    Args:
        segments: of all rows.
        encoder: makes the ids.
        lead: the tokenizer's ids of a newline to put before texts that continue others; mostly none.
    """
    if not lead and all(segment.ids is None and segment.allow_special for segment in segments):
        ids, offsets = encoder.encode_batch_flat([segment.text for segment in segments], allow_special=True)
        return _Encoded(ids, offsets.tolist())
    pieces: list[Ids] = [np.zeros(0, np.int32)] * len(segments)
    for allow_special in (True, False):
        chosen = [
            index
            for index, segment in enumerate(segments)
            if segment.ids is None and segment.allow_special == allow_special
        ]
        if chosen:
            texts = [segments[index].text for index in chosen]
            for index, ids in zip(chosen, _encode_texts(texts, encoder, allow_special=allow_special), strict=True):
                pieces[index] = ids
            if lead:
                continuing = [index for index in chosen if segments[index].continues]
                texts = ["\n" + segments[index].text for index in continuing]
                for index, ids in zip(
                    continuing, _encode_texts(texts, encoder, allow_special=allow_special), strict=True
                ):
                    if ids[: len(lead)].tolist() == list(lead):  # else the newline is part of another token
                        pieces[index] = ids[len(lead) :]
    for index, segment in enumerate(segments):
        if segment.ids is not None:
            pieces[index] = np.array(segment.ids, np.int32)
    return _Encoded(_concatenated(pieces), [0, *itertools.accumulate(map(len, pieces))])


def _encode_texts(texts: Sequence[str], encoder: Encoder, *, allow_special: bool) -> list[Ids]:
    ids, offsets = encoder.encode_batch_flat(texts, allow_special=allow_special)
    return [ids[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def _concatenated(pieces: Sequence[Ids]) -> Ids:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def _row(completion: Completion, plan: RowPlan, bounds: Sequence[int], options: TokenizeOptions) -> _Row:
    """A row whose segments end at these places; `bounds` starts with the row's own start."""
    first = bounds[0]
    spans: list[tuple[int, int]] = []
    for segment, start, end in zip(plan.segments, bounds, bounds[1:], strict=False):
        if segment.is_loss and spans and spans[-1][1] == start - first:
            spans[-1] = (spans[-1][0], end - first)
        elif segment.is_loss:
            spans.append((start - first, end - first))
    length = bounds[-1] - first
    flags = plan.flags
    num_sampled_tokens = spans[-1][1] - spans[-1][0]
    if completion.output_tokens is not None and completion.output_tokens != num_sampled_tokens:
        flags |= RowFlag.OUTPUT_MISMATCH
    window = options.max_seq_len
    if spans[0][0] >= window:
        raise prompt_too_long(f"{spans[0][0]} tokens", options)
    if length > window:
        flags |= RowFlag.WINDOW_CUT
        length = window
        spans = [(start, min(end, window)) for start, end in spans if start < window]
    longest = max([end - start for start, end in spans])
    if longest < options.min_loss_tokens:
        raise too_few_loss_tokens(longest, options)
    return _Row(completion, plan, first, first + length, spans, num_sampled_tokens, flags)


def _flag_verbatim(rows: Sequence[_Row], encoder: Encoder, lead: Sequence[int]) -> None:
    """Flag rows whose `output_tokens` says that white space which the template trimmed was sampled."""
    doubtful: list[_Row] = []
    segments: list[Segment] = []
    for row in rows:
        if row.plan.verbatim is not None and row.flags & RowFlag.OUTPUT_MISMATCH:
            doubtful.append(row)
            segments.append(row.plan.verbatim)
    lengths = np.diff(_encode(segments, encoder, lead).bounds).tolist()
    for row, length in zip(doubtful, lengths, strict=True):
        if length == row.completion.output_tokens:
            row.flags |= RowFlag.VERBATIM_WHITESPACE


def _join(rows: Sequence[_Row], ids: Ids) -> TokenizedRows:
    """Rows of the batch from the ids of all segments, without a copy where every row is there whole."""
    offsets = offsets_of([row.end - row.start for row in rows])
    if offsets[-1] != len(ids):
        ids = _concatenated([ids[row.start : row.end] for row in rows])
    mask: npt.NDArray[np.bool_] = np.zeros(len(ids), np.bool_)
    for row, base in zip(rows, offsets.tolist(), strict=False):
        for start, end in row.spans:
            mask[base + start : base + end] = True
    completions = [row.completion for row in rows]
    return TokenizedRows(
        ids=ids,
        offsets=offsets,
        mask=mask,
        sample_ids=[completion.sample_id for completion in completions],
        sources=[completion.source or "" for completion in completions],
        num_loss_tokens=np.array([sum(end - start for start, end in row.spans) for row in rows], np.int32),
        output_tokens=np.array(
            [-1 if row.output_tokens is None else min(row.output_tokens, INT32_MAX) for row in completions], np.int32
        ),
        finish_reasons=[completion.finish_reason or "" for completion in completions],
        flags=np.array([row.flags for row in rows], np.uint16),
        scripts=[dominant_script(row.plan.response_head) for row in rows],
    )
