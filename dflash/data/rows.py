"""Tokenized rows on their way from the encoder into a shard, as flat buffers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash.data.records import Reject

INT32_MAX = 2**31 - 1


class RowFlag(enum.IntFlag):
    """What is worth counting about a row; the bits are stored in a shard's index."""

    THINKING_ONLY = 1  # a trace and no answer
    LENGTH_CUT = 2  # the server cut it: finish_reason length
    WINDOW_CUT = 4  # cut at max_seq_len
    SAMPLED_IDS = 8  # the record carried the sampled ids
    UNDECODABLE = 16  # the loss tokens don't decode to valid text
    OUTPUT_MISMATCH = 32  # the last response, before the cut, has another length than the record's output_tokens
    VERBATIM_WHITESPACE = 64  # output_tokens fits the untrimmed text: the template trimmed sampled whitespace


@dataclass(frozen=True, slots=True)
class TokenizedRows:
    """n rows, t tokens in all.

    Attributes:
        ids: int32 [t], the rows' ids joined.
        offsets: int64 [n + 1], row i is ids[offsets[i]:offsets[i + 1]].
        mask: bool [t], true where the target sampled the token.
        sample_ids: n strings.
        sources: n strings, empty where the record doesn't say.
        num_loss_tokens: int32 [n].
        output_tokens: int32 [n], -1 where unknown.
        finish_reasons: n strings, empty where the record doesn't say.
        flags: uint16 [n], `RowFlag` bits.
        scripts: n strings, the dominant script of the response such as latin or han.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    sample_ids: Sequence[str]
    sources: Sequence[str]
    num_loss_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    finish_reasons: Sequence[str]
    flags: npt.NDArray[np.uint16]
    scripts: Sequence[str]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def part(self, start: int, end: int) -> TokenizedRows:
        """Rows start to end, as views of the same buffers."""
        first, last = int(self.offsets[start]), int(self.offsets[end])
        return TokenizedRows(
            ids=self.ids[first:last],
            offsets=self.offsets[start : end + 1] - first,
            mask=self.mask[first:last],
            sample_ids=self.sample_ids[start:end],
            sources=self.sources[start:end],
            num_loss_tokens=self.num_loss_tokens[start:end],
            output_tokens=self.output_tokens[start:end],
            finish_reasons=self.finish_reasons[start:end],
            flags=self.flags[start:end],
            scripts=self.scripts[start:end],
        )


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some rows of a batch.

    Attributes:
        rows: the rows.
        numbers: the place in the batch of each, ascending.
        rejects: by their places, of what has no row.
        encoder: name of the encoder that made the ids.
    """

    rows: TokenizedRows
    numbers: Sequence[int]
    rejects: Mapping[int, Reject]
    encoder: str


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Where rows of these lengths begin, and where the last one ends: [n] to [n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def put_in_order(parts: Sequence[BatchPart]) -> TokenizedRows:
    """Rows of all parts (at least one) by their places in the batch."""
    if len(parts) == 1:
        return parts[0].rows
    order = np.argsort(np.concatenate([part.numbers for part in parts]), kind="stable").tolist()
    rows = join_rows([part.rows for part in parts])
    ranges = [slice(*rows.offsets[number : number + 2].tolist()) for number in order]
    return TokenizedRows(
        ids=np.concatenate([rows.ids[:0], *(rows.ids[place] for place in ranges)]),
        offsets=offsets_of(np.diff(rows.offsets)[order]),
        mask=np.concatenate([rows.mask[:0], *(rows.mask[place] for place in ranges)]),
        sample_ids=[rows.sample_ids[number] for number in order],
        sources=[rows.sources[number] for number in order],
        num_loss_tokens=rows.num_loss_tokens[order],
        output_tokens=rows.output_tokens[order],
        finish_reasons=[rows.finish_reasons[number] for number in order],
        flags=rows.flags[order],
        scripts=[rows.scripts[number] for number in order],
    )


def join_rows(parts: Sequence[TokenizedRows]) -> TokenizedRows:
    """Put the rows of `parts` (at least one) behind one another, in order."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return TokenizedRows(
        ids=np.concatenate([part.ids for part in parts]),
        offsets=offsets_of(lengths),
        mask=np.concatenate([part.mask for part in parts]),
        sample_ids=[value for part in parts for value in part.sample_ids],
        sources=[value for part in parts for value in part.sources],
        num_loss_tokens=np.concatenate([part.num_loss_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        finish_reasons=[value for part in parts for value in part.finish_reasons],
        flags=np.concatenate([part.flags for part in parts]),
        scripts=[value for part in parts for value in part.scripts],
    )
