"""The heaviest packs first, so that a run that doesn't fit says so in its first minute and not in its third hour.

Before its first step a run makes one with packs that are full to the last token and have as many anchors as there can
be, and throws the result away: gradients and moments are dropped and no weight moves. So the order of the data, and an
exact resume, don't know of it. The alternative, to train on the longest rows first, would change what is learnt, and
would only be as heavy as the rows that were looked at. The price is the time of a step or two.

On a GPU this also compiles what a step compiles. Where the features come from elsewhere they are zeros here; target
ranks make their own rehearsal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from dflash.data.batches import BatchState, Pack
from dflash.data.row_reader import Row
from dflash.train.config import ReplayConfig, TrainConfig
from dflash.train.engine import Engine
from dflash.train.feature_source import ComputedFeatures, FrozenEnds, States
from dflash.train.memory_watch import MemoryWatch
from dflash.train.replay import Features

log = logging.getLogger(__name__)

# Packs of the run whose rows are looked at for their lengths.
RAMP_UP_PACKS = 16


def wants_ramp_up(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run begins with its heaviest packs: on GPUs unless it is off, elsewhere where it is on."""
    if config.ramp_up == "auto":
        return device.type == "cuda" and not config.replay.max_bytes
    return config.ramp_up == "on"


def ramp_up(engine: Engine, packs: Iterator[Pack], memory: MemoryWatch | None) -> None:
    """Make the heaviest step there can be, where the run is one that wants it.

    Args:
        engine: of the run, before its first step.
        packs: of the run, from where it is; a few are read for the lengths of their rows.
        memory: reports what it came to.

    Raises:
        TrainingError: out of memory, although packs were halved.
    """
    heavy = ramp_up_packs(engine.config, engine.device, packs)
    if not heavy:
        return
    rehearse(engine, heavy)
    if memory is not None:
        memory.report("after the ramp-up")


def ramp_up_packs(config: TrainConfig, device: torch.device, packs: Iterator[Pack]) -> list[Pack]:
    """Return the packs to begin with: none where the run doesn't want any, or has nothing left to do."""
    some = list(islice(packs, RAMP_UP_PACKS)) if wants_ramp_up(config, device) else []
    return heaviest_packs(some, config) if some else []


def heaviest_packs(some: Sequence[Pack], config: TrainConfig) -> list[Pack]:
    """Make packs that are as heavy as the run's can be.

    Args:
        some: a few packs of the run, whose rows' ids and lengths are used.
        config: token budget.

    Returns:
        One pack of copies of the longest row, and one of as many rows for its size as there are on average.
    """
    rows = [row for pack in some for row in pack.rows]
    ids = np.concatenate([row.input_ids for row in rows])
    lengths = [len(row.input_ids) for row in rows]
    mixed = [length for length in lengths if length > 1] or [2]
    return [_pack(ids, _fill(chosen, config.pack_tokens)) for chosen in ([max(2, *lengths)], mixed)]


def rehearse(engine: Engine, packs: Sequence[Pack]) -> None:
    """Make a step of packs and throw its result away; ranks that train must all do so.

    Raises:
        TrainingError: out of memory although the packs were halved, or at all where the drafter is sharded.
    """
    started, kept = time.monotonic(), engine.features
    if not isinstance(kept.source, ComputedFeatures):
        final = engine.config.loss.objective == "kl"
        blank = _ZeroFeatures(kept.source.ends, engine.drafter.config.feature_size, final=final)
        engine.features = Features(blank, ReplayConfig(), engine.device)
    try:
        engine.rehearse(packs)
    finally:
        engine.features = kept
    seconds = time.monotonic() - started
    log.info("ramp-up: %d packs of %d tokens went through in %.1f s", len(packs), packs[0].num_tokens, seconds)


class _ZeroFeatures:
    """Stands in for a source whose target runs elsewhere: what counts is the memory."""

    def __init__(self, ends: FrozenEnds, feature_size: int, *, final: bool) -> None:
        self.ends = ends
        self._feature_size = feature_size
        self._final = final

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Nothing."""

    def states(self, pack: Pack) -> States:
        """Zeros."""
        like = self.ends.head_VH
        features_SF = like.new_zeros(pack.num_tokens, self._feature_size)
        return States(features_SF, like.new_zeros(pack.num_tokens, like.shape[1]) if self._final else None)

    def close(self, failed: BaseException | None = None) -> None:
        """Nothing."""


def _fill(lengths: list[int], budget: int) -> list[int]:
    """Repeat lengths until the budget is full to the last token."""
    found: list[int] = []
    while (room := budget - sum(found)) > 0:
        found.append(min(lengths[len(found) % len(lengths)], room))
    return found


def _pack(ids: npt.NDArray[np.int32], lengths: list[int]) -> Pack:
    """Rows of given lengths, all of whose tokens can begin a block."""
    ends = np.cumsum(lengths)
    tiled = np.resize(ids, int(ends[-1]))
    rows = tuple(
        Row((-1, place), tiled[end - length : end], np.ones(length, dtype=np.bool_), f"ramp-up-{place}", "ramp-up")
        for place, (length, end) in enumerate(zip(lengths, ends, strict=True))
    )
    return Pack(rows, -1, -1, BatchState())
