"""Where the features of a pack come from: one interface, whoever runs the target.

| source | the target runs |
|---|---|
| `ComputedFeatures` | in this process, when features are asked for (`colocated`, and the target ranks of `split`) |
| `dflash.train.split_drafter.ReceivedFeatures` | in other ranks, which send them |
| `dflash.train.server_features.ServerFeatures` | in a vLLM server |

Legend: S tokens of a packed row, F = K*H values of a token's features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dflash.data.batches import Pack
from dflash.data.row_reader import Row
from dflash.train.packed import PackedRow


class FrozenEnds(Protocol):
    """The parts of the target that the drafter itself uses."""

    @property
    def embedding_VH(self) -> Tensor:
        """Input embedding, frozen."""
        ...

    @property
    def head_VH(self) -> Tensor:
        """Output head, frozen."""
        ...


class FeatureModel(FrozenEnds, Protocol):
    """What is needed of a target in this process."""

    def features(self, input_ids_S: Tensor, position_S: Tensor, document_S: Tensor) -> Tensor:
        """Run the target over a packed row and return [S, F]."""
        ...

    def features_and_final(self, input_ids_S: Tensor, position_S: Tensor, document_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return [S, F] and the states [S, H] that the head reads; only the KL objective asks for them."""
        ...


class States(NamedTuple):
    """What the target says about a pack.

    Attributes:
        features_SF: of the chosen layers.
        final_SH: what the head reads, where the objective needs it.
    """

    features_SF: Tensor
    final_SH: Tensor | None


@runtime_checkable
class FeatureSource(Protocol):
    """Gives the states of packs, in whatever way; used by one thread."""

    @property
    def ends(self) -> FrozenEnds:
        """The target's embedding and head, on the drafter's device."""
        ...

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Hear which packs come next: the step's own and those behind it, in order. What isn't named may be dropped."""
        ...

    def states(self, pack: Pack) -> States:
        """Return the states of a pack, or of one half of it, as many rows as it has tokens, on the drafter's device.

        Raises:
            TrainingError: they can't be had, or aren't those of the pack's rows.
        """
        ...

    def close(self, failed: BaseException | None = None) -> None:
        """The run has ended, well or by an error."""
        ...


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """Embedding and head without the layers between them.

    Attributes:
        embedding_VH: on the drafter's device.
        head_VH: the very same tensor where they are tied.
        norm_scale_H: factor of the target's final norm, fp32.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    norm_scale_H: Tensor

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one tensor in memory."""
        return self.head_VH.data_ptr() == self.embedding_VH.data_ptr()

    def to(self, device: torch.device) -> TargetEnds:
        """Return them on a device; what is tied stays tied."""
        embedding_VH = self.embedding_VH.to(device)
        head_VH = embedding_VH if self.is_tied else self.head_VH.to(device)
        return TargetEnds(embedding_VH, head_VH, self.norm_scale_H.to(device))


class ComputedFeatures:
    """Runs the target in this process when it is asked.

    Args:
        target: on the device.
        final: also give the states that the head reads.
    """

    def __init__(self, target: FeatureModel, *, final: bool = False) -> None:
        self._target = target
        self._final = final

    @property
    def ends(self) -> FeatureModel:
        """The target."""
        return self._target

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Nothing: the target's device is busy with the drafter."""

    def states(self, pack: Pack) -> States:
        """Run the target over a pack."""
        packed = PackedRow.of(pack.rows)
        device = self._target.head_VH.device
        tensors = [tensor.to(device) for tensor in (packed.ids_S, packed.position_S, packed.document_S)]
        if self._final:
            found = States(*self._target.features_and_final(*tensors))
        else:
            found = States(self._target.features(*tensors), None)
        # A prefix cache or a wrong hook shortens features silently; then every later row would be misaligned.
        assert len(found.features_SF) == pack.num_tokens, (len(found.features_SF), pack.num_tokens)
        return found

    def close(self, failed: BaseException | None = None) -> None:
        """Nothing."""


def row_digest(row: Row) -> str:
    """Name a row by its sample id and its ids."""
    found = hashlib.sha256(row.sample_id.encode())
    found.update(b"\0")
    found.update(row.input_ids.tobytes())
    return found.hexdigest()


def pack_digest(pack: Pack) -> str:
    """Name a pack by its rows, in order."""
    return hashlib.sha256("".join(map(row_digest, pack.rows)).encode()).hexdigest()


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name as `str(dtype)` gives it, without its `torch.`; only those that targets have."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
