"""A target rank's whole run, from loading the target to the last goodbye."""

from __future__ import annotations

from collections.abc import Callable

from dflash.data.batches import BatchState, ShardSource
from dflash.data.prefetch import prefetch
from dflash.model.features import Target
from dflash.train.config import TrainConfig
from dflash.train.feature_source import ComputedFeatures
from dflash.train.loop import order_of
from dflash.train.seats import Seat
from dflash.train.setup import ends_of
from dflash.train.split_target import TargetFeed


def run_target_rank(
    seat: Seat, config: TrainConfig, load: Callable[[], Target], source: ShardSource, start: BatchState
) -> None:
    """Load the target and serve the drafter ranks until they end.

    Args:
        seat: of this rank.
        config: of the run.
        load: loads the target.
        source: the same shards that the drafter ranks read.
        start: where the run goes on.

    Raises:
        PeerLostError: a drafter rank died.
        DflashError: what stops the target; the drafter ranks are told.
    """
    peers, topology = seat.peers, seat.topology
    assert peers is not None
    failed: BaseException | None = None
    try:
        target = load()
        feed = TargetFeed(ComputedFeatures(target, final=config.loss.objective == "kl"), peers, topology.drafter_ranks)
        number = seat.target_number
        feed.send_ends(
            ends_of(target), [rank for rank in range(topology.drafter_ranks) if rank % topology.target_ranks == number]
        )
        packs = order_of(config).packs(source, start)
        ours = prefetch(pack for pack in packs if topology.target_of(pack.index) == number)
        try:
            feed.run(ours)
        finally:
            ours.close()
    except BaseException as error:
        failed = error
        raise
    finally:
        peers.say_bye(failed)
        peers.close()
