"""A target that is larger than a device, spread over the target ranks with FSDP2.

Each rank keeps its share of every layer and fetches the rest of a layer just before it runs, so each rank still
computes packs of its own and the ranks' arithmetic is that of an unsharded target. Tensor parallelism would exchange
activations instead of weights; it is what engines do better, and a plan of it exists for fewer architectures (a server
as the source, `dflash.train.server_features`, brings it).

Fetching is a collective: all target ranks must make equally many passes. They do so in rounds of one pack each; a rank
with fewer batches in its pack, or with no pack, makes passes over a single token for the others.

Embedding and head stay whole: drafter ranks get them from here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dflash.data.batches import Pack
from dflash.model.features import Target, similar_lengths
from dflash.model.target_loading import find_layers
from dflash.train.packed import row_slices
from dflash.train.world import losing_a_rank


def load_spread(
    load: Callable[[], Target], group: dist.ProcessGroup, turns: dist.ProcessGroup, device: torch.device
) -> Target:
    """Load a target on the CPU, one rank after the other, and spread its layers over a group.

    Args:
        load: loads the whole target on the CPU; the machine's memory holds one at a time.
        group: of the target ranks; all must call this.
        turns: the same ranks, on whose barriers a load may take as long as it takes.
        device: of this rank.

    Raises:
        PeerLostError: another target rank is gone.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    target: Target | None = None
    for turn in range(dist.get_world_size(group)):
        if dist.get_rank(group) == turn:
            target = load()
            _spread(target, mesh, device)
        with losing_a_rank("A target rank"):
            dist.barrier(group=turns)
    assert target is not None
    return target


class Lockstep:
    """Keeps the passes of the target ranks equal in number.

    Args:
        target: spread over the group.
        group: of the target ranks.
        device: of this rank.
    """

    def __init__(self, target: Target, group: dist.ProcessGroup, device: torch.device) -> None:
        self._target = target
        self._group = group
        self._device = device
        self._missing = 0

    def enter(self, pack: Pack | None, *, ending: bool = False) -> bool:
        """Begin a round with the other ranks; return false where it is the end for all of them.

        Args:
            pack: that this rank is going to compute, in one call; None for none.
            ending: this rank's drafter ranks are gone.

        Raises:
            PeerLostError: another target rank is gone.
        """
        own = 0 if pack is None else len(similar_lengths([(part.start, part.stop) for part in row_slices(pack)]))
        values = torch.tensor([own, int(ending), int(pack is not None)], device=self._device)
        with losing_a_rank("A target rank"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        most, ends, goes_on = values.tolist()
        self._missing = most - own
        return bool(goes_on) and not ends

    def fill_up(self) -> None:
        """Make the passes that this rank lacks in the round."""
        for _ in range(self._missing):
            self._target.features(torch.zeros(1, dtype=torch.int64, device=self._device))
        self._missing = 0


def _spread(target: Target, mesh: DeviceMesh, device: torch.device) -> None:
    layers = find_layers(target.model)[1]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # moves the layer to the device, one at a time
    inside = {id(tensor) for tensor in (*layers.parameters(), *layers.buffers())}
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(device)
