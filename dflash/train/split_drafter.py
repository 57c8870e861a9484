"""A drafter rank's end of the queue: it asks for packs ahead of its steps and checks what comes.

Legend: S tokens of a packed row, F feature values of a token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.data.batches import Pack
from dflash.errors import PeerLostError, TrainingError
from dflash.train.feature_source import States, TargetEnds, dtype_of, pack_digest
from dflash.train.peers import Message, Peers, ended
from dflash.train.seats import Seat


@dataclass(slots=True)
class _Wanted:
    """A pack that was asked for; its states are kept until its step is over, since a step may begin anew."""

    pack: Pack
    rank: int
    states: States | None = None


class ReceivedFeatures:
    """Features that target ranks compute.

    The queue is bounded by what was asked for: the packs of the step and `topology.lookahead` behind them. They wait in
    the memory of the target ranks, so that this rank holds those of its step alone.

    Args:
        seat: of this rank.
        device: where the drafter is.
        feature_size: F.
        final: the objective needs the final states as well.

    Raises:
        PeerLostError: a target rank is gone.
    """

    def __init__(self, seat: Seat, device: torch.device, feature_size: int, *, final: bool = False) -> None:
        assert seat.peers is not None
        self._seat = seat
        self._peers: Peers = seat.peers
        self._device = device
        self._feature_size = feature_size
        self._final = final
        self._wanted: dict[int, _Wanted] = {}
        self._ready: dict[int, Message] = {}
        self._ends = self._receive_ends()

    @property
    def ends(self) -> TargetEnds:
        """Embedding and head, which a target rank sent."""
        return self._ends

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Ask for the packs that weren't asked for yet, in order, and forget those that are done."""
        coming = {pack.index: pack for pack in packs if pack is not None}
        self._wanted = {index: wanted for index, wanted in self._wanted.items() if index in coming}
        for index, pack in coming.items():
            if index not in self._wanted:
                self._wanted[index] = _Wanted(pack, self._seat.target_rank_of(index))
                rank = self._wanted[index].rank
                missing = [at for at, one in self._wanted.items() if one.rank == rank and one.states is None]
                self._peers.send(rank, "want", index=index, oldest=missing[0])

    def states(self, pack: Pack) -> States:
        """Return the states of a pack that was announced by `prepare`, or of its rows that `pack` holds.

        Raises:
            PeerLostError: a target rank is gone.
            TrainingError: the target rank read other rows than this one.
        """
        wanted = self._wanted[pack.index]
        if wanted.states is None:
            wanted.states = self._receive(wanted)
        keys = [row.key for row in wanted.pack.rows]
        start = sum(len(row.input_ids) for row in wanted.pack.rows[: keys.index(pack.rows[0].key)])
        part = slice(start, start + pack.num_tokens)
        features_SF, final_SH = wanted.states
        return States(features_SF[part], None if final_SH is None else final_SH[part])

    def close(self, failed: BaseException | None = None) -> None:
        """Let the target ranks end; what they have announced is received and dropped, since they can't unsend it.

        Where a rank is gone nothing is waited for: there is half a minute to save.
        """
        self._peers.say_bye(failed)
        if isinstance(failed, PeerLostError):
            return
        waiting = set(self._peers.others)
        # Without room for what they send they are left as they are: why this rank fails is more important.
        with contextlib.suppress(PeerLostError, torch.OutOfMemoryError):
            for message in self._ready.values():
                self._tensors(message)
            while waiting:
                message = self._peers.get("the target ranks to end")
                if message.kind == "bye":
                    waiting.discard(message.sender)
                else:
                    self._tensors(message)
        self._peers.close()

    def _receive(self, wanted: _Wanted) -> States:
        while wanted.pack.index not in self._ready:
            message = self._peers.get(f"pack {wanted.pack.index}")
            if message.kind == "bye":
                raise ended(message)
            self._ready[message.fields["index"]] = message
        message = self._ready[wanted.pack.index]
        _check(message, wanted.pack)
        states = self._tensors(message)
        del self._ready[wanted.pack.index]
        return states

    def _tensors(self, message: Message) -> States:
        """Receive what a message announced, into room that is made before: without it nothing has been received yet."""
        num_tokens, size = message.fields["num_tokens"], self._ends.embedding_VH.shape[1]
        features_SF = self._room((num_tokens, self._feature_size))
        final_SH = self._room((num_tokens, size)) if self._final else None
        for values in (features_SF, final_SH):
            if values is not None:
                self._peers.receive_tensor(message.sender, values)
        return States(features_SF, final_SH)

    def _receive_ends(self) -> TargetEnds:
        """Take the parts of the target that this rank needs from its turn's target rank: no rank loads it twice."""
        message = self._peers.get("the target's embedding and head")
        if message.kind == "bye":
            raise ended(message)
        size, dtype = tuple(message.fields["size"]), dtype_of(message.fields["dtype"])
        embedding_VH = self._tensor(message.sender, size, dtype)
        head_VH = embedding_VH if message.fields["tied"] else self._tensor(message.sender, size, dtype)
        return TargetEnds(embedding_VH, head_VH, self._tensor(message.sender, size[1:], torch.float32))

    def _tensor(self, rank: int, size: Any, dtype: torch.dtype) -> Tensor:
        values = torch.empty(size, dtype=dtype, device=self._device)
        self._peers.receive_tensor(rank, values)
        return values

    def _room(self, size: tuple[int, int]) -> Tensor:
        return torch.empty(size, dtype=self._ends.embedding_VH.dtype, device=self._device)


def _check(message: Message, pack: Pack) -> None:
    expected = {"num_tokens": pack.num_tokens, "digest": pack_digest(pack)}
    found = {name: message.fields[name] for name in expected}
    if found != expected:
        raise TrainingError(
            f"Rank {message.sender} computed other rows for pack {pack.index} than this rank reads (the first here is "
            f"{pack.rows[0].sample_id!r}): expected {expected}, found {found}. All ranks must see the same dataset; "
            "look for a shard that changed on one machine, and run `dflash verify`."
        )
