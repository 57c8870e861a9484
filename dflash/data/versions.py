"""The published versions of a dataset, and what two of them have in common and not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.data.compatibility import Recipe, compare_recipes
from dflash.data.dataset import DatasetRoot
from dflash.data.mix import mix_of
from dflash.data.quality_report import Baseline
from dflash.data.shards import read_index
from dflash.data.without_pandas import to_numpy
from dflash.errors import DatasetError
from dflash.manifest import Counts, Manifest, PointerMove, ShardEntry

# 1, 2 to 3, 4 to 7, ... 524,288 to 1,048,575; what lies outside counts at the ends.
HISTOGRAM_EDGES: Final = tuple(2**power for power in range(21))
_COLUMNS: Final = ["source", "script", "num_tokens", "num_loss_tokens"]


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One published version.

    Attributes:
        at: when it was first published, ISO 8601.
        action: how: publish, adopt, restore.
        sources: where its batches came from, in order; the last is what it added.
        is_current: the pointer names it.
    """

    version: int
    name: str
    at: str
    action: str
    is_current: bool
    parent: str | None
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    num_shards: int
    num_bytes: int
    sources: tuple[str, ...]
    gate_override_reason: str | None


def list_versions(root: DatasetRoot) -> list[VersionLine]:
    """Every version that the pointer ever named, oldest first.

    Raises:
        DatasetError: nothing was published, or a manifest is missing or damaged.
    """
    pointer = root.pointer()
    if pointer is None:
        raise DatasetError(f"{root.uri} holds no published version. Publish one with `dflash tokenize`.")
    first: dict[str, PointerMove] = {}
    for move in pointer.record.history:
        first.setdefault(move.manifest, move)
    lines = (_line(root.manifest(name), move, pointer.record.manifest) for name, move in first.items())
    return sorted(lines, key=lambda line: (line.version, line.at))


def _line(manifest: Manifest, move: PointerMove, current: str) -> VersionLine:
    counts = manifest.counts
    return VersionLine(
        version=manifest.version,
        name=manifest.name,
        at=move.at.isoformat(),
        action=move.action,
        is_current=manifest.name == current,
        parent=manifest.parent,
        num_rows=counts.num_rows,
        num_tokens=counts.num_tokens,
        num_loss_tokens=counts.num_loss_tokens,
        num_shards=counts.num_shards,
        num_bytes=counts.num_bytes,
        sources=tuple(batch.source for batch in manifest.batches),
        gate_override_reason=manifest.gate_override_reason,
    )


@dataclass(frozen=True, slots=True)
class VersionProfile:
    """What one version holds.

    Attributes:
        counts: the manifest's totals.
        mix: rows by source and by script.
        lengths: rows by number of tokens, in the bins of `HISTOGRAM_EDGES`.
        loss_tokens: rows by number of loss tokens, likewise.
    """

    name: str
    counts: Counts
    mix: Baseline
    lengths: tuple[int, ...]
    loss_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionDiff:
    """Two versions side by side.

    Attributes:
        edges: lower bound of each bin of both histograms, in tokens.
        shared_shards: shards that both name.
        only_first, only_second: shards that one of them names.
        settings: what differs in tokenizer, options and schema: name, first, second.
    """

    first: VersionProfile
    second: VersionProfile
    edges: tuple[int, ...]
    shared_shards: int
    only_first: int
    only_second: int
    settings: tuple[tuple[str, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        pair = {
            name: asdict(profile) | {"counts": profile.counts.model_dump(), "mix": profile.mix.model_dump()}
            for name, profile in (("first", self.first), ("second", self.second))
        }
        return asdict(self) | pair


def diff_versions(root: DatasetRoot, first: int | str | None, second: int | str | None) -> VersionDiff:
    """Compare two published versions by their manifests and indexes; a shard that both name is read once.

    Args:
        root: the dataset.
        first: number or name; None for the current version.
        second: likewise.

    Raises:
        DatasetError: there is no such version, or an index is damaged.
    """
    pair = (root.manifest(first), root.manifest(second))
    entries = {entry.sha256: entry for manifest in pair for entry in manifest.shards}
    tallies = {sha256: _tally(root, entry) for sha256, entry in entries.items()}
    profiles = [_profile(manifest, [tallies[entry.sha256] for entry in manifest.shards]) for manifest in pair]
    names = [{entry.sha256 for entry in manifest.shards} for manifest in pair]
    return VersionDiff(
        profiles[0],
        profiles[1],
        edges=HISTOGRAM_EDGES,
        shared_shards=len(names[0] & names[1]),
        only_first=len(names[0] - names[1]),
        only_second=len(names[1] - names[0]),
        settings=tuple(compare_recipes(*(Recipe.of(manifest) for manifest in pair))),
    )


@dataclass(frozen=True, slots=True)
class _Tally:
    """The mix and the histograms of one shard."""

    sources: dict[str, int]
    scripts: dict[str, int]
    lengths: npt.NDArray[np.int64]
    loss_tokens: npt.NDArray[np.int64]


def _tally(root: DatasetRoot, entry: ShardEntry) -> _Tally:
    table: pa.Table = read_index(root.fetch_index(entry)).select(_COLUMNS)
    return _Tally(
        mix_of(table["source"]),
        mix_of(table["script"]),
        _histogram(to_numpy(table["num_tokens"])),
        _histogram(to_numpy(table["num_loss_tokens"])),
    )


def _histogram(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    bins = np.searchsorted(np.array(HISTOGRAM_EDGES), values, side="right") - 1
    return np.bincount(np.maximum(bins, 0), minlength=len(HISTOGRAM_EDGES))


def _profile(manifest: Manifest, tallies: Sequence[_Tally]) -> VersionProfile:
    none = np.zeros(len(HISTOGRAM_EDGES), np.int64)
    return VersionProfile(
        manifest.name,
        manifest.counts,
        Baseline(
            sources=_sum(tally.sources for tally in tallies),
            scripts=_sum(tally.scripts for tally in tallies),
        ),
        lengths=tuple(sum((tally.lengths for tally in tallies), none).tolist()),
        loss_tokens=tuple(sum((tally.loss_tokens for tally in tallies), none).tolist()),
    )


def _sum(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))
