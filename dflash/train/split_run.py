"""A target rank's whole run, from loading the target to the last goodbye."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash.data.batches import BatchState, ShardSource
from dflash.data.prefetch import prefetch
from dflash.errors import PeerLostError
from dflash.model.features import Target
from dflash.train.config import TrainConfig
from dflash.train.feature_source import ComputedFeatures
from dflash.train.loop import order_of
from dflash.train.ramp_up import ramp_up_packs
from dflash.train.seats import Seat
from dflash.train.setup import ends_of
from dflash.train.sharded_target import Lockstep, load_spread
from dflash.train.split_target import TargetFeed
from dflash.train.world import losing_a_rank


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where the order of packs goes on.

    Attributes:
        source: the same shards that the drafter ranks read.
        state: of the newest checkpoint.
    """

    source: ShardSource
    state: BatchState


def run_target_rank(
    seat: Seat, config: TrainConfig, load: Callable[[torch.device], Target], device: torch.device, data: Beginning
) -> None:
    """Load the target and serve the drafter ranks until they end.

    Args:
        seat: of this rank.
        config: of the run.
        load: loads the target on a device.
        device: of this rank.
        data: what it reads.

    Raises:
        PeerLostError: a drafter rank died.
        DflashError: what stops the target; the drafter ranks are told.
    """
    peers, topology = seat.peers, seat.topology
    assert peers is not None
    failed: BaseException | None = None
    try:
        target, lockstep = _target(seat, load, device)
        computed = ComputedFeatures(target, final=config.loss.objective == "kl")
        feed = TargetFeed(computed, peers, topology.drafter_ranks, lockstep)
        number = seat.target_number
        feed.send_ends(
            ends_of(target), [rank for rank in range(topology.drafter_ranks) if rank % topology.target_ranks == number]
        )
        order = order_of(config)
        if heavy := ramp_up_packs(config, device, order.packs(data.source, data.state)):
            feed.rehearse(heavy)
        packs = order.packs(data.source, data.state)
        ours = prefetch(pack for pack in packs if topology.target_of(pack.index) == number)
        try:
            with losing_a_rank("A target rank"):
                feed.run(ours)
        finally:
            ours.close()
    except BaseException as error:
        failed = error
        raise
    finally:
        peers.say_bye(failed)
        if not isinstance(failed, PeerLostError):  # where a rank is gone nothing is waited for
            peers.close()


def _target(seat: Seat, load: Callable[[torch.device], Target], device: torch.device) -> tuple[Target, Lockstep | None]:
    """Load the target whole, or spread over the target ranks."""
    if seat.target_group is None or seat.loading_group is None:
        return load(device), None
    target = load_spread(lambda: load(torch.device("cpu")), seat.target_group, seat.loading_group, device)
    return target, Lockstep(target, seat.target_group, device)
