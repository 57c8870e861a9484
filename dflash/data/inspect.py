"""One sample for a person: what the drafter is trained on, token by token, coloured.

By id a dataset is searched in its indexes (about 30 bytes a row), by number in its manifest; either way one shard is
fetched, mapped into memory, and one of its record batches is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from rich.text import Text

from dflash.data.dataset import DatasetRoot
from dflash.data.quality_report import printable
from dflash.data.rows import RowFlag
from dflash.data.shards import read_batches, read_index
from dflash.data.without_pandas import to_numpy
from dflash.errors import UsageError
from dflash.manifest import Manifest, ShardEntry

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer

CONTEXT, CONTROL, LOSS, LOSS_CONTROL, BROKEN = "dim", "magenta", "green", "bold black on green", "bold white on red"
_VISIBLE_SPACE: Final = {" ": "·", "\n": "⏎\n", "\t": "→\t", "\r": "␍"}
_JOINERS: Final = "\u200c\u200d"  # letters of Persian, Hindi and emoji need them; they steer nothing


@dataclass(frozen=True, slots=True)
class Facts:
    """What the index knows about a row beside its tokens."""

    output_tokens: int | None
    finish_reason: str
    flags: RowFlag
    script: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a dataset.

    Attributes:
        number: place in the dataset's order (in its shard, where it was loaded from one file).
        place: shard and row, such as `shards/3f9a.arrow row 12`.
        input_ids: int32 [S].
        loss_mask: bool [S], true where the target sampled the token.
        facts: None where there is no index.
    """

    number: int
    place: str
    sample_id: str
    source: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    facts: Facts | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        known: dict[str, Any] = {}
        if self.facts is not None:
            known = {
                "output_tokens": self.facts.output_tokens,
                "finish_reason": self.facts.finish_reason,
                "flags": _flag_names(self.facts.flags),
                "script": self.facts.script,
            }
        return {
            "number": self.number,
            "place": self.place,
            "sample_id": self.sample_id,
            "source": self.source,
            "num_tokens": len(self.input_ids),
            "num_loss_tokens": int(self.loss_mask.sum()),
            **known,
            "input_ids": self.input_ids.tolist(),
            "loss_mask": self.loss_mask.tolist(),
        }


def load_sample(root: DatasetRoot, manifest: Manifest, key: int | str) -> Sample:
    """Fetch one sample by its number in dataset order (int) or by its id (str, the first that has it).

    Raises:
        UsageError: the version has no such sample.
        DatasetError: its shard or index can't be read.
    """
    start = 0
    for entry in manifest.shards:
        row = _row_in_shard(root, entry, key, start)
        if row is not None:
            index = read_index(root.fetch_index(entry)).slice(row, 1).to_pylist()[0]
            facts = Facts(
                index["output_tokens"],
                index["finish_reason"] or "",
                RowFlag(index["flags"] or 0),
                index["script"] or "",
            )
            return _read_row(root.fetch_shard(entry), row, start + row, f"{entry.key} row {row}", facts)
        start += entry.num_rows
    raise _no_such_sample(f"{root.uri} {manifest.name}", key, start)


def load_sample_from_file(path: Path, key: int | str) -> Sample:
    """Read one sample of a shard file by its row (int) or by its id (str).

    Raises:
        UsageError: the shard has no such sample.
        DatasetError: the file isn't a shard.
    """
    start = 0
    for batch in read_batches(path):
        row = key - start if isinstance(key, int) else pc.index(batch["sample_id"], key).as_py()
        if 0 <= row < batch.num_rows:
            return _read_row(path, start + row, start + row, f"{path.name} row {start + row}", None)
        start += batch.num_rows
    raise _no_such_sample(str(path), key, start)


def render_sample(sample: Sample, tokenizer: TargetTokenizer, *, colour: bool = True) -> Text:
    """Write a sample as text: loss tokens green, control tokens and the white space of loss tokens visible.

    Args:
        sample: the row.
        tokenizer: of the dataset.
        colour: without it loss tokens stand between `⟦` and `⟧`.
    """
    text = _header(sample, colour=colour)
    inside = False
    for piece, in_loss, style in _pieces(sample, tokenizer):
        if not colour and in_loss != inside:
            text.append("⟦" if in_loss else "⟧")
        inside = in_loss
        text.append(piece, style if colour else None)
    if inside and not colour:
        text.append("⟧")
    return text


def _row_in_shard(root: DatasetRoot, entry: ShardEntry, key: int | str, start: int) -> int | None:
    if isinstance(key, int):
        return key - start if 0 <= key - start < entry.num_rows else None
    row: int = pc.index(read_index(root.fetch_index(entry))["sample_id"], key).as_py()
    return row if row >= 0 else None


def _read_row(path: Path, row: int, number: int, place: str, facts: Facts | None) -> Sample:
    start = 0
    for batch in read_batches(path):
        if row < start + batch.num_rows:
            values = {name: batch[name][row - start] for name in batch.schema.names}
            return Sample(
                number=number,
                place=place,
                sample_id=values["sample_id"].as_py() or "",
                source=values["source"].as_py() or "",
                input_ids=to_numpy(values["input_ids"].values).copy(),
                loss_mask=to_numpy(values["loss_mask"].values).copy(),
                facts=facts,
            )
        start += batch.num_rows
    raise UsageError(f"{path} has {start} rows, but its index says that there is a row {row}. Run `dflash verify`.")


def _no_such_sample(where: str, key: int | str, num_rows: int) -> UsageError:
    if isinstance(key, int):
        return UsageError(f"{where} has no sample number {key}: expected 0 to {num_rows - 1}.")
    return UsageError(f"{where} has no sample with the id {key!r} among its {num_rows:,} rows; ids are exact.")


def _header(sample: Sample, *, colour: bool) -> Text:
    num_tokens, num_loss = len(sample.input_ids), int(sample.loss_mask.sum())
    lines = [
        f"sample {sample.number}  id {printable(sample.sample_id)}  source {printable(sample.source) or '(not given)'}",
        f"{sample.place}  {num_tokens:,} tokens, {num_loss:,} loss tokens ({num_loss / max(num_tokens, 1):.1%})",
    ]
    if sample.facts is not None:
        facts = sample.facts
        output = "unknown" if facts.output_tokens is None else f"{facts.output_tokens:,}"
        flags = ", ".join(_flag_names(facts.flags)) or "none"
        reason = printable(facts.finish_reason) or "(not given)"
        lines.append(f"output_tokens {output}  finish_reason {reason}  script {facts.script}  flags {flags}")
    text = Text().append("\n".join(lines) + "\n", "bold" if colour else None)
    legend = [("context", CONTEXT), ("control token", CONTROL), ("loss", LOSS), ("control token in loss", LOSS_CONTROL)]
    if colour:
        for name, style in legend:
            text.append(f" {name} ", style).append(" ")
        text.append("\n")
    return text.append("\n")


def _pieces(sample: Sample, tokenizer: TargetTokenizer) -> Iterator[tuple[str, bool, str]]:
    """Text, whether it is loss, and style of each run of tokens of one kind.

    A run is decoded as a whole, since a character may be spread over several tokens.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    known = tokenizer.known_ids
    unknown = np.fromiter((number not in known for number in ids.tolist()), np.bool_, len(ids))
    control = np.isin(ids, np.fromiter(tokenizer.special_ids, np.int32)) & ~unknown
    kind = mask.astype(np.int8) + 2 * control + 4 * unknown
    bounds = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        run, in_loss = ids[start:end].tolist(), bool(mask[start])
        if unknown[start]:
            yield "".join(f"<id {number} is not in the vocabulary>" for number in run), in_loss, BROKEN
            continue
        text = _sanitised(tokenizer.token_bytes.decode(run).decode(errors="replace"))
        if in_loss:
            text = "".join(_VISIBLE_SPACE.get(char, char) for char in text)
        styles = (LOSS_CONTROL if in_loss else CONTROL) if control[start] else (LOSS if in_loss else CONTEXT)
        yield text, in_loss, styles


def _sanitised(text: str) -> str:
    """Leave line breaks and tabs; show every other invisible character as an escape."""
    return "".join(char if char in "\n\t" or char in _JOINERS else printable(char) for char in text)


def _flag_names(flags: RowFlag) -> list[str]:
    return [flag.name.lower() for flag in flags if flag.name]
