"""Features of the target, computed or kept from before.

On small CPUs the target's forward pass is 80 % of a step. Features of the first rows that fit into a fixed number of
bytes are kept in memory (never on disk), later epochs find them there, and extra steps can be made of kept rows alone.

Rows are kept until the memory is full and none is ever dropped for another: an epoch visits each row once, so dropping
the oldest would lose each row just before it is wanted. What is kept is decided by token counts alone, so a resumed
run keeps the same rows; it recomputes their features when it meets them.

Legend: S tokens of a row, F = K*H values of a token's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dflash.data.batches import BatchState, Pack
from dflash.data.row_reader import Row
from dflash.train.config import ReplayConfig
from dflash.train.feature_source import FeatureSource, States
from dflash.train.seeds import named_numpy_generator


class Features:
    """Gives the features of packs.

    Args:
        source: where they come from.
        config: how much is kept, and as what.
        device: where the drafter is.
    """

    def __init__(self, source: FeatureSource, config: ReplayConfig, device: torch.device) -> None:
        self.source = source
        self._config = config
        self._device = device
        self._dtype = getattr(torch, config.dtype)
        self._rows: dict[tuple[int, int], Row] = {}
        self._kept: dict[tuple[int, int], Tensor] = {}
        # The target's only thread: it isn't for several at once.
        self._thread = ThreadPoolExecutor(1, "target") if config.in_background else None
        self._coming: dict[tuple[int, int], Future[Tensor]] = {}
        self.num_bytes = 0
        self.num_computed_tokens = 0

    @property
    def num_rows(self) -> int:
        """Rows that are kept."""
        return len(self._rows)

    def states(self, pack: Pack) -> States:
        """Return the states of a pack, on the device.

        With replay each row goes through the target alone: its features then don't depend on the rows packed with it,
        so a kept row and a recomputed one are the same.
        """
        if not self._config.max_bytes:
            self.num_computed_tokens += pack.num_tokens
            return self.source.states(pack)
        return States(torch.cat([self._row(row) for row in pack.rows]), None)

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Say what `states` will be asked for next; a background thread begins to compute it."""
        self.source.prepare(packs)
        if self._thread is None:
            return
        for row in (row for pack in packs if pack is not None for row in pack.rows):
            if row.key not in self._kept and row.key not in self._coming:
                self._coming[row.key] = self._thread.submit(self._compute, row)

    def close(self, failed: BaseException | None = None) -> None:
        """End the background thread and the source; what isn't begun is dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.source.close(failed)

    def draw(self, budget: int, num_packs: int, key: str) -> list[Pack]:
        """Make packs of kept rows, drawn at random without replacement; `key` decides which."""
        keys = list(self._rows)
        order = named_numpy_generator(key).permutation(len(keys))
        packs: list[list[Row]] = [[]]
        for row in (self._rows[keys[index]] for index in order):
            if sum(len(other.input_ids) for other in packs[-1]) + len(row.input_ids) > budget:
                if len(packs) == num_packs:
                    break
                packs.append([])
            packs[-1].append(row)
        return [Pack(tuple(rows), -1, -1, BatchState()) for rows in packs if rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the kept rows without their features, as tensors that `torch.load(weights_only=True)` takes."""
        rows = self._rows.values()
        return {
            "keys": [list(row.key) for row in rows],
            "ids": [torch.from_numpy(row.input_ids) for row in rows],
            "masks": [torch.from_numpy(row.loss_mask) for row in rows],
            "names": [[row.sample_id, row.source] for row in rows],
            "num_bytes": self.num_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; features are recomputed when their row is next used."""
        columns = (state["keys"], state["ids"], state["masks"], state["names"])
        self._kept = {}
        self._rows = {}
        for key, ids, mask, (sample_id, source) in zip(*columns, strict=True):
            at = (int(key[0]), int(key[1]))
            self._rows[at] = Row(at, ids.numpy(), mask.numpy(), sample_id, source)
        self.num_bytes = state["num_bytes"]

    def _row(self, row: Row) -> Tensor:
        kept = self._kept.get(row.key)
        if kept is None:
            kept = self._computed(row).to("cpu", self._dtype)
            if row.key in self._rows or self._admit(row, kept.numel() * kept.element_size()):
                self._kept[row.key] = kept
        return kept.to(self._device)

    def _computed(self, row: Row) -> Tensor:
        if self._thread is None:
            return self._compute(row)
        coming = self._coming.pop(row.key, None)
        return (coming or self._thread.submit(self._compute, row)).result()

    def _admit(self, row: Row, num_bytes: int) -> bool:
        if self.num_bytes + num_bytes > self._config.max_bytes:
            return False
        self.num_bytes += num_bytes
        self._rows[row.key] = row
        return True

    def _compute(self, row: Row) -> Tensor:
        self.num_computed_tokens += len(row.input_ids)
        return self.source.states(Pack((row,), -1, -1, BatchState())).features_SF
