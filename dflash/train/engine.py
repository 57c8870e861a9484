"""One optimiser step: forward and backward over micro-batches, sums over ranks, update.

The loss of a step is (sum of all numerators) / (sum of all weights), over micro-batches and ranks. Gradients are
summed raw and divided once, so it makes no difference how rows are spread.

Legend: S tokens of a packed row, F feature values of a token, N blocks, B slots, L predicted slots, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dflash.data.batches import Pack
from dflash.errors import TrainingError
from dflash.model.attention import BlockLayout
from dflash.model.drafter import Drafter, block_embeddings
from dflash.train.anchors import sample_anchors
from dflash.train.config import TrainConfig
from dflash.train.feature_source import FrozenEnds, States
from dflash.train.loss import LossSums, SlotTargets, block_loss, slot_targets
from dflash.train.optim import learning_rate, make_optimizer, scale_and_clip, set_learning_rate
from dflash.train.packed import PackedRow, row_slices
from dflash.train.replay import Features
from dflash.train.seeds import named_generator
from dflash.train.vocabulary import LossVocabulary
from dflash.train.world import World

log = logging.getLogger(__name__)
_SCALARS = ("numerator", "weight", "tokens", "rows", "anchors", "skipped_rows", "stop", "halved")


class StepSums:
    """What a step adds up, in one fp64 vector so that one all-reduce does it."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self.vector = torch.zeros(len(_SCALARS) + 2 * num_slots, dtype=torch.float64, device=device)

    def add(self, **scalars: float | Tensor) -> None:
        """Add to named sums."""
        for name, value in scalars.items():
            self.vector[_SCALARS.index(name)] += value

    def add_slots(self, sums: LossSums) -> None:
        """Add hits and counts of the slots."""
        self.vector[len(_SCALARS) :] += torch.cat([sums.hits_L, sums.counts_L])

    def __getitem__(self, name: str) -> float:
        return float(self.vector[_SCALARS.index(name)])

    def accuracy(self) -> tuple[float, list[float]]:
        """Return the share of slots right, over all and for each slot."""
        hits_L, counts_L = self.vector[len(_SCALARS) :].view(2, self._num_slots).cpu()
        overall = hits_L.sum() / counts_L.sum().clamp(min=1)
        return float(overall), (hits_L / counts_L.clamp(min=1)).tolist()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    Attributes:
        sums: over all micro-batches and ranks.
        grad_norm: before clipping; None where nothing was updated.
        rate: learning rate.
    """

    sums: StepSums
    grad_norm: float | None
    rate: float


@dataclass(slots=True)
class Engine:
    """Everything that a step needs and changes.

    Attributes:
        config: of the run.
        drafter: with fp32 weights on the device.
        target: its embedding and head.
        features: computes, receives or replays the target's features.
        world: the ranks.
        vocabulary: samples the ids of each loss; None takes all.
        halved: packs are split in two since an out-of-memory error of any rank, and their blocks with them.
    """

    config: TrainConfig
    drafter: Drafter
    target: FrozenEnds
    features: Features
    world: World
    vocabulary: LossVocabulary | None = None
    halved: bool = False
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        """Set up the optimiser."""
        self.optimizer = make_optimizer(self.drafter, self.config.optimizer)

    @property
    def device(self) -> torch.device:
        """Where drafter and target are."""
        return self.target.head_VH.device

    def step(self, packs: Sequence[Pack | None], key: str, progress: float, *, stop: bool = False) -> StepReport:
        """Make one optimiser step of this rank's packs and those of the other ranks.

        Args:
            packs: this rank's micro-batches; None where it takes part without one.
            key: names the step; with the seed and a pack's index it decides the anchors.
            progress: of the run, 0 to 1.
            stop: this rank wants to stop; the sum tells all ranks.

        Raises:
            TrainingError: out of memory although packs are halved already; or at all where the drafter is sharded: the
                other ranks wait inside collectives then, so nothing can begin anew.
        """
        sums = self._accumulate_within_memory(packs, key)
        sums.add(stop=float(stop), halved=float(self.halved))
        self.world.sum(sums.vector)
        self.halved = sums["halved"] > 0  # from the next step on all ranks split alike, as their checkpoint says
        weights = list(self.drafter.parameters())
        if not self._is_sharded:
            self.world.sum_gradients(weights)
        rate = learning_rate(progress, self.config.optimizer)
        if not sums["weight"]:
            self.optimizer.zero_grad()
            return StepReport(sums, None, rate)
        norm = scale_and_clip(weights, sums["weight"], self.config.optimizer.clip_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            sums.add(skipped_rows=sums["rows"] - sums["skipped_rows"])
            return StepReport(sums, None, rate)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepReport(sums, float(norm), rate)

    def rehearse(self, packs: Sequence[Pack]) -> None:
        """Hold at once all that a step of these packs holds, and change nothing but `halved`.

        Raises:
            TrainingError: see `step`.
        """
        sums = StepSums(self.drafter.config.num_draft_tokens, self.device)
        # Where micro-batches accumulate, a backward pass finds the gradients of those before it.
        for group in [packs] if self.config.accumulation > 1 else [[pack] for pack in packs]:
            self._accumulate_within_memory(group, "ramp-up")
            self.optimizer.zero_grad()
        sums.add(halved=float(self.halved))
        self.world.sum(sums.vector)
        self.halved = sums["halved"] > 0
        if not self.optimizer.state:  # of a resumed run the moments are here, and must stay as they are
            self._rehearse_update()

    def _rehearse_update(self) -> None:
        """Let the optimiser allocate its moments: a step of length zero along gradients of zero moves no weight."""
        set_learning_rate(self.optimizer, 0.0)
        for weight in self.drafter.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.state.clear()

    def _accumulate_within_memory(self, packs: Sequence[Pack | None], key: str) -> StepSums:
        """Accumulate; on an out-of-memory error halve the packs once and begin the step anew."""
        try:
            return self._accumulate(packs, key)
        except torch.OutOfMemoryError as error:
            if self.halved or self._is_sharded:
                raise self._out_of_memory() from error
        log.warning(
            "out of memory with packs of %d tokens: from here on each is made in two halves, which takes longer",
            self.config.pack_tokens,
        )
        self.halved = True
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            return self._accumulate(packs, key)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory() from error

    def _out_of_memory(self) -> TrainingError:
        halved = ", halved already" if self.halved else ""
        return TrainingError(
            f"Out of memory with packs of {self.config.pack_tokens} tokens{halved}. Set recompute, or lower "
            "loss.chunk_blocks: the run goes on from its newest checkpoint. Lower pack_tokens or num_anchors with "
            "another output. `dflash plan` says by how much."
        )

    @property
    def _is_sharded(self) -> bool:
        """Whether forward and backward passes hold collectives, so that all ranks must make equally many."""
        return self.config.sharding == "fsdp" and self.world.size > 1

    def _accumulate(self, packs: Sequence[Pack | None], key: str) -> StepSums:
        sums = StepSums(self.drafter.config.num_draft_tokens, self.device)
        present = [pack for pack in packs if pack is not None]
        passes = 0
        for number, pack in enumerate(present):
            for half, part in enumerate(pack.halves() if self.halved else (pack,)):
                # Packs of the order have an index; those of replay are told apart by their place.
                place = half if pack.index >= 0 else number + half * len(present)
                generator = named_generator(f"{self.config.seed}/{key}/{pack.index}/{place}")
                passes += self._micro_batch(part, generator, sums)
        # A run that was halved while it was replicated may go on sharded; a pack of one row has no second half.
        wanted = len(packs) * (2 if self.halved else 1)
        for _ in range(wanted - passes if self._is_sharded else 0):
            self._idle_pass()
        return sums

    def _idle_pass(self) -> None:
        """Make a forward and backward pass that adds zero, to take part in the collectives of the others."""
        config = self.drafter.config
        features_1F = torch.zeros(1, config.feature_size, device=self.device)
        embeddings_1BH = torch.zeros(1, config.block_size, config.hidden_size, device=self.device)
        layout = BlockLayout.single(torch.zeros(1, dtype=torch.int64, device=self.device), 1)
        with self._autocast():
            hidden_1BH = self.drafter(features_1F, embeddings_1BH, layout)
        (hidden_1BH.sum() * 0).backward()

    def _micro_batch(self, pack: Pack, generator: torch.Generator, sums: StepSums) -> bool:
        """Add one pack's gradient and sums, and return whether a backward pass was made.

        What isn't finite adds nothing but its count; sharded, its gradient goes through and has the whole step skipped.
        """
        packed = PackedRow.of(pack.rows)
        states = self.features.states(pack)
        loss_mask_S, bad_rows = _without_bad_rows(states, packed, pack)
        sums.add(tokens=pack.num_tokens, rows=len(pack.rows), skipped_rows=bad_rows)
        if bad_rows:
            states = _finite(states)
        anchor_N = sample_anchors(loss_mask_S, packed.document_S, self._num_anchors, generator)
        if not len(anchor_N):
            return False
        hidden_NBH, targets = self._draft(replace(packed, loss_mask_S=loss_mask_S), anchor_N, states.features_SF)
        loss = self._loss(hidden_NBH, targets, states.final_SH, generator)
        if not torch.isfinite(loss.numerator) and not self._is_sharded:
            sums.add(skipped_rows=len(pack.rows) - bad_rows)
            return False
        loss.numerator.backward()  # type: ignore[no-untyped-call]
        sums.add(numerator=loss.numerator.detach(), weight=loss.weight, anchors=len(anchor_N))
        sums.add_slots(loss)
        return True

    def _draft(self, packed: PackedRow, anchor_N: Tensor, features_SF: Tensor) -> tuple[Tensor, SlotTargets]:
        """Run the drafter over the blocks; return its final states [N, B, H] and what they should say."""
        ids_S, mask_S, position_S, document_S, anchor_N = (
            tensor.to(self.device, non_blocking=True)
            for tensor in (packed.ids_S, packed.loss_mask_S, packed.position_S, packed.document_S, anchor_N)
        )
        config = self.drafter.config
        layout = BlockLayout(anchor_N, position_S, document_S)
        embeddings_NBH = block_embeddings(self.target.embedding_VH, ids_S, anchor_N, config)
        if not self._uses_autocast:
            features_SF, embeddings_NBH = features_SF.float(), embeddings_NBH.float()
        with self._autocast():
            hidden_NBH = self.drafter(features_SF, embeddings_NBH, layout)
        return hidden_NBH, slot_targets(ids_S, mask_S, document_S, anchor_N, config.block_size)

    def _loss(
        self, hidden_NBH: Tensor, targets: SlotTargets, teacher_SH: Tensor | None, generator: torch.Generator
    ) -> LossSums:
        head_VH, offset_V = self.target.head_VH, None
        if self.vocabulary is not None:
            head_VH, offset_V, targets = self.vocabulary.sample(head_VH, targets, generator)
        options = self.config.loss.options(self.drafter.config.block_size)
        return block_loss(hidden_NBH, head_VH, targets, options, teacher_SH, offset_V)

    @property
    def _num_anchors(self) -> int:
        """Blocks of a micro-batch: a half has half of them, also the one half of a row that can't be split."""
        return -(-self.config.num_anchors // 2) if self.halved else self.config.num_anchors

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._uses_autocast)

    @property
    def _uses_autocast(self) -> bool:
        on_gpu = self.device.type == "cuda"
        return self.config.precision == "bfloat16" or (self.config.precision == "auto" and on_gpu)


def _finite(states: States) -> States:
    """Zeros in place of what isn't finite: a weight of 0 doesn't undo it, and blocks beside a bad row look it up."""
    features_SF = torch.nan_to_num(states.features_SF, 0.0, 0.0, 0.0)
    return States(features_SF, None if states.final_SH is None else torch.nan_to_num(states.final_SH, 0.0, 0.0, 0.0))


def _without_bad_rows(states: States, packed: PackedRow, pack: Pack) -> tuple[Tensor, int]:
    """Return the loss mask without rows whose states aren't all finite, and how many those are."""
    finite_S = torch.stack([torch.isfinite(one).all(dim=1) for one in states if one is not None]).all(dim=0)
    if bool(finite_S.all()):
        return packed.loss_mask_S, 0
    loss_mask_S, finite_S = packed.loss_mask_S.clone(), finite_S.cpu()
    bad = [part for part in row_slices(pack) if not bool(finite_S[part].all())]
    for part in bad:
        loss_mask_S[part] = False
    return loss_mask_S, len(bad)
