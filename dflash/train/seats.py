"""What each rank of a run does: the groups of ranks behind a topology."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dflash.errors import UsageError
from dflash.train.peers import Peers
from dflash.train.topology import Role, TopologyConfig
from dflash.train.world import COLLECTIVE_S, World

# Silence on the messages' group is judged by `topology.peer_timeout_s`, not by the group itself.
_NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place.

    Attributes:
        topology: of the run.
        trainers: the ranks that train, and this one among them; of no meaning on a target rank.
        target_number: this rank among those that run the target for others; None where it trains.
        peers: the other side, in `split`.
        target_group: the target ranks, where the target is spread over them.
        loading_group: the same ranks over gloo, which wait for each other to load it, however long that takes.
    """

    topology: TopologyConfig
    trainers: World
    target_number: int | None = None
    peers: Peers | None = None
    target_group: dist.ProcessGroup | None = None
    loading_group: dist.ProcessGroup | None = None

    @classmethod
    def take(cls, topology: TopologyConfig) -> Seat:
        """Find this rank's place; all ranks must call it at the same time.

        Raises:
            UsageError: there are more or fewer ranks than the topology needs.
        """
        world = World.current()
        if topology.num_ranks is None:
            return cls(topology, world)
        if topology.num_ranks != world.size:
            raise UsageError(
                f"topology split of {topology.target_ranks} target and {topology.drafter_ranks} drafter ranks needs "
                f"{topology.num_ranks} ranks, found {world.size}. Set num_processes to {topology.num_ranks}."
            )
        drafters = list(range(topology.drafter_ranks))
        targets = list(range(topology.drafter_ranks, world.size))
        # Without one they would have NCCL's own of ten minutes, and not that of the ranks together.
        limit = timedelta(seconds=COLLECTIVE_S)
        group = dist.new_group(drafters, timeout=limit)
        talk = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        spread = turns = None
        if topology.shard_target:
            spread = dist.new_group(targets, timeout=limit)
            turns = dist.new_group(targets, backend="gloo", timeout=_NO_TIMEOUT)
        is_target = world.rank in targets
        peers = Peers(drafters if is_target else targets, talk, topology.peer_timeout_s)
        return cls(
            topology,
            World(world.rank, len(drafters), group),
            world.rank - len(drafters) if is_target else None,
            peers,
            spread,
            turns,
        )

    @property
    def role(self) -> Role:
        """What this rank holds."""
        if self.topology.mode == "colocated":
            return "colocated"
        return "drafter" if self.target_number is None else "target"

    def target_rank_of(self, pack_index: int) -> int:
        """The rank that computes a pack."""
        return self.topology.drafter_ranks + self.topology.target_of(pack_index)
