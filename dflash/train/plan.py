"""`dflash plan`: memory of each rank, storage, tokens and time of a run, before anything is loaded; needs no torch.

A plan reads the run's own file, so that what is planned is what runs. Decimal units.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from dflash.config import RunModel
from dflash.errors import UsageError
from dflash.model.layout import DrafterConfig, trainable_parameters
from dflash.train.config import TrainConfig
from dflash.train.cost import TopologyOption, topologies
from dflash.train.memory import (
    MemoryPlan,
    StoragePlan,
    TargetShape,
    frozen_bytes,
    optimizer_bytes,
    plan_memory,
    plan_storage,
    seen_by_device,
)
from dflash.train.preflight import drafter_config, read_text_config
from dflash.train.savings import Suggestion, suggest, suggest_together
from dflash.train.target_shape import TargetNumbers
from dflash.train.topology import Role

# Share of a pack that best-fit packing fills with rows (measured: see `dflash.data.batches`).
PACK_FILL = 0.97
MORE_RANKS = 8  # of a usual machine: the other topology that a plan for one rank names


class PlanRun(RunModel):
    """What a plan reads of a run file; the rest of it doesn't matter here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    train: TrainConfig = Field(default=TrainConfig(), description="The training itself.")
    target: str | None = Field(default=None, description="Folder or id of the target; its config.json is read.")
    target_shape: TargetNumbers | None = Field(default=None, description="The target's sizes, in place of that.")
    num_processes: int = Field(default=1, ge=1, description="Ranks, one for each device.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="A GPU unless it says cpu.")
    tokens_per_s: float | None = Field(default=None, gt=0, description="Of all ranks together, as measured.")
    trust_remote_code: bool = Field(default=False, description="Run code that the target's repository ships.")

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's memory is planned."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much data, and how fast.

    Attributes:
        num_samples: rows.
        tokens_per_sample: mean.
        tokens_per_s: of all ranks together, from a measurement; None gives no time.
    """

    num_samples: int
    tokens_per_sample: float
    tokens_per_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of one epoch."""
        return round(self.num_samples * self.tokens_per_sample)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A planned run.

    Attributes:
        num_parameters: trainable ones of the drafter.
        training_bytes: weights, gradients and AdamW state in fp32.
        frozen_bytes: the target's embedding and head, which the drafter shares with it.
        memory: of one rank, by part; where ranks differ, of those that hold the most.
        roles: of each kind of rank.
        topologies: ways to use the devices, the best first; empty for one device that is enough.
        host_bytes: of the machine's memory, for features that are kept beside a GPU.
        device_bytes: of one device; None where nobody said.
        suggestions: what to change, where it doesn't fit.
        together: changes that fit when all are made; empty where one alone does, or nothing helps.
        storage: offline against online.
        num_tokens: of the whole run.
        num_steps: optimiser steps, about.
        seconds: about; None without a throughput.
        max_seconds: where the run ends by the clock, whatever the data.
    """

    num_parameters: int
    training_bytes: int
    frozen_bytes: int
    memory: MemoryPlan
    roles: dict[Role, MemoryPlan]
    topologies: list[TopologyOption]
    host_bytes: int
    device_bytes: int | None
    suggestions: list[Suggestion]
    together: list[Suggestion]
    storage: StoragePlan
    num_tokens: int
    num_steps: int
    seconds: float | None
    max_seconds: float | None

    @property
    def fits(self) -> bool:
        """Whether a device holds it; true where no device was named."""
        return self.device_bytes is None or self.memory.total_bytes <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"total_bytes": self.memory.total_bytes, "fits": self.fits}


def plan_run(run: PlanRun, amount: Amount, device_bytes: int | None) -> RunPlan:
    """Do the arithmetic of a run.

    Args:
        run: settings and target.
        amount: data and speed.
        device_bytes: memory of one device.

    Raises:
        UsageError: neither target nor its shape is named, or the mask id is missing.
        ModelError: the target's configuration can't be read, or the drafter doesn't fit it.
    """
    numbers, shape = _target(run)
    network = drafter_config(run.train, numbers)
    ranks, train = run.num_processes, seen_by_device(run.train, on_gpu=run.on_gpu)

    def plan_role(config: TrainConfig, role: Role) -> MemoryPlan:
        return plan_memory(config, network, shape, world_size=ranks, role=role)

    def plan(config: TrainConfig) -> MemoryPlan:
        return max((plan_role(config, role) for role in config.topology.roles), key=lambda one: one.total_bytes)

    memory = plan(train)
    fits = device_bytes is None or memory.total_bytes <= device_bytes
    suggestions, together = [], []
    if device_bytes is not None and not fits:
        suggestions = suggest(train, plan, device_bytes, ranks)
        if ranks == 1:
            sharded = plan_memory(train.model_copy(update={"sharding": "fsdp"}), network, shape, world_size=MORE_RANKS)
            suggestions.append(_more_ranks(train, memory, sharded, device_bytes))
        if not any(one.fits for one in suggestions):
            together = suggest_together(train, plan, device_bytes, ranks)
    num_tokens, num_steps = _extent(run, amount)
    return RunPlan(
        num_parameters=trainable_parameters(network),
        training_bytes=optimizer_bytes(network),
        frozen_bytes=frozen_bytes(network, shape),
        memory=memory,
        roles={role: plan_role(train, role) for role in train.topology.roles},
        topologies=_ways(train, network, shape, ranks if ranks > 1 or fits else MORE_RANKS, device_bytes),
        host_bytes=run.train.replay.max_bytes if run.on_gpu else 0,
        device_bytes=device_bytes,
        suggestions=suggestions,
        together=together,
        storage=plan_storage(train, network, shape, amount.num_samples, amount.tokens_per_sample),
        num_tokens=num_tokens,
        num_steps=num_steps,
        seconds=None if amount.tokens_per_s is None else num_tokens / amount.tokens_per_s,
        max_seconds=run.train.max_seconds,
    )


def plan_table(plan: RunPlan, amount: Amount) -> list[tuple[str, str]]:
    """Names and values for people."""
    rows = [
        ("trainable parameters", f"{plan.num_parameters / 1e9:.3f} B ({plan.num_parameters:,})"),
        ("weights, gradients, AdamW", _size(plan.training_bytes)),
        ("frozen embedding and head", _size(plan.frozen_bytes)),
    ]
    for role, memory in plan.roles.items():
        rank = "rank" if role == "colocated" else f"{role} rank"
        rows += [(f"{rank}: {name}", _size(size)) for name, size in memory.parts.items() if size]
        rows.append((f"{rank}: total at the peak", f"{_size(memory.total_bytes)} ({memory.peak})"))
    if plan.host_bytes:
        rows.append(("machine: features kept for replay", _size(plan.host_bytes)))
    if plan.device_bytes is not None:
        rows.append(("device", f"{_size(plan.device_bytes)}: {'fits' if plan.fits else 'TOO SMALL'}"))
    if plan.topologies:
        rows.append(("best topology", _best(plan.topologies)))
    storage = plan.storage
    rows += [
        ("features of a token", f"{storage.bytes_per_token / 1e3:.1f} KB"),
        (
            "features stored (offline)",
            f"{_size(storage.offline_bytes)}: {amount.num_samples:,} x {amount.tokens_per_sample:,.0f} tokens",
        ),
        ("features in memory (online)", f"{storage.online_bytes / 2**20:.0f} MiB of one pack, nothing on disk"),
        ("target passes of an epoch", f"{storage.target_flops / 1e18:.1f} EFLOP"),
    ]
    if plan.max_seconds is not None:
        return [*rows, ("ends", f"after {plan.max_seconds:,.0f} s by the clock at the latest")]
    rows += [("tokens of the run", f"{plan.num_tokens:,}"), ("optimiser steps, about", f"{plan.num_steps:,}")]
    if plan.seconds is not None:
        rows.append(("time, about", f"{plan.seconds / 3600:.1f} h at {amount.tokens_per_s:,.0f} tokens/s"))
    return rows


def advice(plan: RunPlan) -> list[str]:
    """One sentence for each change that helps; empty where the run fits."""
    lines = [one.describe() for one in plan.suggestions]
    if not plan.fits and plan.topologies and plan.topologies[0].fits:
        lines.append(f"topology -> {plan.topologies[0].describe()}, and fits")
    if plan.together:
        changes = ", ".join(f"{one.setting} {one.before} -> {one.after}" for one in plan.together)
        saved = sum(one.saved_bytes for one in plan.together)
        lines.append(f"no single change is enough; together these save {_size(saved)} and fit: {changes}")
    elif plan.suggestions and not any(one.fits for one in plan.suggestions):
        lines.append(
            "all of these together are not enough: take a larger device, a smaller drafter or a smaller target"
        )
    return lines


def known_device_bytes() -> int | None:
    """Memory of the smallest CUDA device here; None where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return None
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def _target(run: PlanRun) -> tuple[Any, TargetShape]:
    if run.target_shape is not None:
        numbers = run.target_shape
        return numbers, TargetShape(
            numbers.num_parameters, numbers.hidden_size, numbers.intermediate_size, numbers.bytes_per_value
        )
    if run.target is None:
        raise UsageError("A plan needs the target: give `target` (a folder with config.json) or [target_shape].")
    text_config = read_text_config(run.target, trust_remote_code=run.trust_remote_code)
    try:
        import torch

        from dflash.train.device_memory import target_shape
    except ImportError as error:
        raise UsageError(
            f"Counting the parameters of {run.target} needs torch: {error}. Give [target_shape] in the file, or "
            "install the extra: pip install 'dflash-pipeline[train]'."
        ) from error
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    return text_config, target_shape(text_config, dtype, trust_remote_code=run.trust_remote_code)


def _ways(
    config: TrainConfig, network: DrafterConfig, target: TargetShape, ranks: int, device_bytes: int | None
) -> list[TopologyOption]:
    return topologies(config, network, target, ranks, device_bytes) if ranks > 1 else []


def _best(options: list[TopologyOption]) -> str:
    """The best way, and the best of the other kind for comparison."""
    if not options[0].fits:
        return "none fits: shard_target, fsdp or larger devices"
    other = next((one for one in options if one.mode != options[0].mode), None)
    rest = "" if other is None else f"; {'next' if other.fits else 'too large'}: {other.describe()}"
    return f"{options[0].describe()}{rest}"


def _more_ranks(config: TrainConfig, memory: MemoryPlan, sharded: MemoryPlan, device_bytes: int) -> Suggestion:
    """The other topology: one drafter spread over the devices of a machine."""
    return Suggestion(
        "num_processes and sharding",
        f"1 {config.sharding}",
        f"{MORE_RANKS} fsdp",
        memory.total_bytes - sharded.total_bytes,
        sharded.total_bytes <= device_bytes,
    )


def _extent(run: PlanRun, amount: Amount) -> tuple[int, int]:
    """Tokens and optimiser steps of the whole run; `max_steps` bounds both."""
    topology = run.train.topology
    trainers = topology.drafter_ranks if topology.mode == "split" else run.num_processes
    per_step = run.train.pack_tokens * PACK_FILL * run.train.accumulation * trainers
    num_tokens = amount.num_tokens * (run.train.num_epochs or 1)
    num_steps = math.ceil(num_tokens / per_step)
    if run.train.max_steps is not None and run.train.max_steps < num_steps:
        return round(run.train.max_steps * per_step), run.train.max_steps
    return num_tokens, num_steps


def _size(num_bytes: float) -> str:
    for unit, scale, digits in (("TB", 1e12, 1), ("GB", 1e9, 2), ("MB", 1e6, 1)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} bytes"
