"""Which ranks run the target and which train the drafter; read on machines without torch.

`colocated`: each rank does both. `split`: ranks 0..N-1 train, ranks N..N+M-1 run the target for them. `server`: each
rank trains, and a server runs the target.

In `split` pack p of the global order is computed by target p modulo M and trained on by the drafter whose turn it is,
so who computes what is fixed by the order alone, and a pack's features can't land in another step. A queue that hands
packs to whoever is free would even out differences of speed; packs are filled to the same token budget, so there are
few, and each drafter's lookahead absorbs them.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from dflash.config import RunModel
from dflash.validation import check_address

# What a rank holds: both, the target alone, or the drafter with the target's embedding and head.
Role = Literal["colocated", "target", "drafter"]


class TopologyConfig(RunModel):
    """Table `[train.topology]`. A resumed run may change all of it: none of it decides what is computed."""

    mode: Literal["colocated", "split", "server"] = Field(
        default="colocated",
        description="`colocated`: each rank holds target and drafter. `split`: target ranks feed drafter ranks. "
        "`server`: a vLLM server runs the target.",
    )
    target_ranks: int = Field(default=1, ge=1, le=1024, description="split: ranks that run the target.")
    drafter_ranks: int = Field(default=1, ge=1, le=1024, description="split: ranks that train the drafter.")
    queue_packs: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Packs that a drafter rank asks for ahead of its step: the bound of the queue. By default enough "
        "to keep each target rank at work.",
    )
    shard_target: bool = Field(
        default=False,
        description="split: spread the target's weights over the target ranks, for targets larger than a device.",
    )
    peer_timeout_s: float = Field(
        default=1800.0, gt=0, description="Silence of another rank or of the server after which the run ends."
    )
    server_url: str | None = Field(default=None, description="server: its address, such as http://127.0.0.1:8000.")
    server_folder: str | None = Field(
        default=None, description="server: the folder that it writes states to and that this machine sees."
    )
    server_model: str | None = Field(default=None, description="server: the model's name there; default the target's.")

    @field_validator("server_url")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        return None if url is None else check_address(url)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that another mode would need."""
        is_server = self.mode == "server"
        if [self.server_url is not None, self.server_folder is not None] != [is_server, is_server]:
            raise ValueError("topology.mode server, server_url and server_folder belong together: give all or none")
        if self.mode != "split" and (self.target_ranks, self.drafter_ranks) != (1, 1):
            raise ValueError("topology.target_ranks and drafter_ranks are of mode split: set mode, or leave them out")
        if self.shard_target and (self.mode != "split" or self.target_ranks < 2):
            raise ValueError("topology.shard_target needs mode split and at least 2 target_ranks to spread it over")
        if self.shard_target and self.lookahead(1) * self.drafter_ranks < self.target_ranks:
            raise ValueError(
                f"topology.shard_target: all {self.target_ranks} target ranks work at the same time, so queue_packs x "
                f"drafter_ranks must be at least that; found {self.queue_packs} x {self.drafter_ranks}"
            )
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that ranks have."""
        found: dict[str, tuple[Role, ...]] = {"split": ("target", "drafter"), "server": ("drafter",)}
        return found.get(self.mode, ("colocated",))

    @property
    def num_ranks(self) -> int | None:
        """Ranks that the mode needs; None where any number will do."""
        return self.target_ranks + self.drafter_ranks if self.mode == "split" else None

    def lookahead(self, accumulation: int) -> int:
        """Packs that a drafter rank asks for beyond those of its step."""
        if self.mode == "colocated":
            return accumulation
        busy = -(-2 * self.target_ranks // self.drafter_ranks)  # one in work and one ready for each target rank
        return self.queue_packs or max(accumulation, busy)

    def target_of(self, pack_index: int) -> int:
        """The target rank, counted from 0 among them, that computes a pack."""
        return pack_index % self.target_ranks
