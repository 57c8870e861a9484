"""A target rank: it computes the packs that drafter ranks ask for and sends their states.

Legend: S tokens of a packed row, F feature values of a token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.data.batches import Pack
from dflash.errors import TrainingError
from dflash.train.feature_source import ComputedFeatures, States, TargetEnds, pack_digest
from dflash.train.peers import Message, Peers
from dflash.train.sharded_target import Lockstep

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """Tensors on their way to a drafter rank; they must live until they are there."""

    index: int
    tensors: list[Tensor]
    works: list[dist.Work]


@dataclass(slots=True)
class _Drafter:
    """What a drafter rank wants and what is on its way to it."""

    sent: list[_Sent] = field(default_factory=list)
    done: bool = False


class TargetFeed:
    """Serves drafter ranks until they all say goodbye.

    It computes nothing that wasn't asked for, so a slow drafter stops it, and what waits for a drafter is at most what
    that drafter may ask for.

    Args:
        source: runs the target.
        peers: the drafter ranks.
        drafter_ranks: how many they are.
        lockstep: of the target ranks, where the target is spread over them.
    """

    def __init__(
        self, source: ComputedFeatures, peers: Peers, drafter_ranks: int, lockstep: Lockstep | None = None
    ) -> None:
        self._source = source
        self._lockstep = lockstep
        self._peers = peers
        self._drafters = {rank: _Drafter() for rank in range(drafter_ranks)}
        self._wanted: dict[int, int] = {}
        self._halved = False

    def send_ends(self, ends: TargetEnds, ranks: list[int]) -> None:
        """Send embedding and head to the drafter ranks that take them from this rank."""
        tensors = [ends.embedding_VH, *([] if ends.is_tied else [ends.head_VH]), ends.norm_scale_H]
        size, dtype = list(ends.embedding_VH.shape), str(ends.embedding_VH.dtype).removeprefix("torch.")
        for rank in ranks:
            self._peers.send(rank, "ends", size=size, dtype=dtype, tied=ends.is_tied)
            self._peers.finish(rank, [self._peers.send_tensor(rank, tensor.contiguous()) for tensor in tensors])

    def run(self, packs: Iterator[Pack]) -> None:
        """Serve.

        Args:
            packs: this rank's, in the global order.

        Raises:
            PeerLostError: a drafter rank died.
            TrainingError: a drafter rank asks for a pack that isn't the next one; out of memory with halves of a pack.
        """
        for pack in packs:
            asked = self._is_asked_for(pack)
            if self._lockstep is not None and not self._lockstep.enter(pack, ending=not asked):
                return
            if not asked:
                return
            self._send(self._wanted.pop(pack.index), pack, self._states(pack))
        while self._lockstep is not None and self._lockstep.enter(None):
            self._lockstep.fill_up()
        while self._hear(None):
            pass

    def rehearse(self, packs: Sequence[Pack]) -> None:
        """Compute packs for nobody, so that memory runs out now or never."""
        for pack in packs:
            if self._lockstep is not None:
                self._lockstep.enter(pack)
            self._states(pack)
        log.info("ramp-up: the target took %d packs of %d tokens", len(packs), packs[0].num_tokens)

    def _is_asked_for(self, pack: Pack) -> bool:
        """Wait until a drafter rank asks for a pack; false where nobody will any more."""
        while pack.index not in self._wanted:
            if not self._hear(pack.index):
                return False
        return True

    def _hear(self, next_index: int | None) -> bool:
        """Take in one message; return whether anyone still needs this rank."""
        message = self._peers.get("requests of the drafter ranks")
        drafter = self._drafters[message.sender]
        if message.kind == "bye":
            drafter.done = True
            self._wanted = {index: rank for index, rank in self._wanted.items() if rank != message.sender}
            if message.fields["failed"]:
                log.warning("drafter rank %d failed, so this rank ends: %s", message.sender, message.fields["failed"])
                return False
            self._release(message.sender, drafter.sent)
            return not all(one.done for one in self._drafters.values())
        self._note(message, next_index)
        return True

    def _note(self, message: Message, next_index: int | None) -> None:
        index = message.fields["index"]
        if next_index is None or index < next_index:
            raise TrainingError(
                f"Rank {message.sender} wants pack {index}, but this rank's next one is {next_index}: they don't read "
                "the same data from the same place. Start the run again: it goes on from the newest checkpoint."
            )
        self._wanted[index] = message.sender
        self._release(
            message.sender, [one for one in self._drafters[message.sender].sent if one.index < message.fields["oldest"]]
        )

    def _release(self, rank: int, arrived: list[_Sent]) -> None:
        """Let go of what a drafter rank has received, or is about to."""
        for one in list(arrived):
            self._peers.finish(rank, one.works)
            self._drafters[rank].sent.remove(one)

    def _states(self, pack: Pack) -> States:
        """Run the target; after running out of memory in two halves, from there on."""
        if self._lockstep is not None:
            states = self._source.states(pack)
            self._lockstep.fill_up()
            return states
        if not self._halved:
            try:
                return self._source.states(pack)
            except torch.OutOfMemoryError:
                log.warning("the target ran out of memory with %d tokens: from here on in halves", pack.num_tokens)
                self._halved = True
                torch.cuda.empty_cache()
        try:
            parts = [self._source.states(half) for half in pack.halves()]
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"The target ran out of memory with half a pack, {pack.num_tokens // 2} tokens. Lower pack_tokens, or "
                "set topology.shard_target; `dflash plan` says by how much."
            ) from error
        final = (
            None
            if parts[0].final_SH is None
            else torch.cat([part.final_SH for part in parts if part.final_SH is not None])
        )
        return States(torch.cat([part.features_SF for part in parts]), final)

    def _send(self, rank: int, pack: Pack, states: States) -> None:
        self._peers.send(rank, "ready", index=pack.index, num_tokens=pack.num_tokens, digest=pack_digest(pack))
        tensors = [tensor for tensor in states if tensor is not None]
        works = [self._peers.send_tensor(rank, tensor) for tensor in tensors]
        self._drafters[rank].sent.append(_Sent(pack.index, tensors, works))
