"""Whether a plan fits a device, and where it doesn't, what to change by how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash.errors import MemoryPlanError
from dflash.model.layout import DrafterConfig
from dflash.train.config import TrainConfig
from dflash.train.memory import DEFAULT_ENVIRONMENT_BYTES, MemoryPlan, TargetShape, plan_memory


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that saves memory.

    Attributes:
        setting: its name in the run's configuration.
        before: value.
        after: value.
        saved_bytes: on each rank.
        fits: whether it is enough, alone or with those before it in its list.
    """

    setting: str
    before: str
    after: str
    saved_bytes: int
    fits: bool

    def describe(self) -> str:
        """What to change and what it brings."""
        change = f"{self.setting} {self.before} -> {self.after}"
        return f"{change} saves {_gb(self.saved_bytes)}{' and fits' if self.fits else ''}"


def check_memory(
    config: TrainConfig,
    network: DrafterConfig,
    target: TargetShape,
    device_bytes: int,
    *,
    world_size: int = 1,
    environment_bytes: int = DEFAULT_ENVIRONMENT_BYTES,
) -> MemoryPlan:
    """Return the plan if it fits the device.

    Raises:
        MemoryPlanError: it doesn't; the message lists the parts and what to change by how much.
    """

    def plan(changed: TrainConfig) -> MemoryPlan:
        return plan_memory(changed, network, target, world_size=world_size, environment_bytes=environment_bytes)

    return check_plan(config, plan, device_bytes, world_size)


def check_plan(
    config: TrainConfig, plan: Callable[[TrainConfig], MemoryPlan], device_bytes: int, world_size: int
) -> MemoryPlan:
    """Return what is planned for a rank if it fits the device.

    Args:
        config: of the run.
        plan: gives the plan of a configuration.
        device_bytes: memory of the device.
        world_size: ranks that train.

    Raises:
        MemoryPlanError: see `check_memory`.
    """
    planned = plan(config)
    if planned.total_bytes <= device_bytes:
        return planned
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in planned.parts.items() if size)
    changes = suggest(config, plan, device_bytes, world_size)
    together = suggest_together(config, plan, device_bytes, world_size)
    advice = "; ".join(one.describe() for one in changes)
    if together and not any(one.fits for one in changes):
        advice += "; no single change is enough, but " + ", then ".join(one.describe() for one in together)
    raise MemoryPlanError(
        f"The run needs {_gb(planned.total_bytes)} on each device, which has {_gb(device_bytes)}: {parts}. "
        f"What to change: {advice or 'nothing in this configuration is large enough; take a larger device'}."
    )


def check_host_memory(replay_bytes: int, available_bytes: int) -> None:
    """Check the memory beside a GPU, where features that are kept for replay lie.

    Raises:
        MemoryPlanError: there is less than replay may take.
    """
    if replay_bytes > available_bytes:
        raise MemoryPlanError(
            f"replay.max_bytes allows {_gb(replay_bytes)} of kept features in this machine's memory, of which "
            f"{_gb(available_bytes)} is free. Lower replay.max_bytes by {_gb(replay_bytes - available_bytes)} or more."
        )


def check_host_holds(target_bytes: int, available_bytes: int) -> None:
    """Check the machine's memory where a target passes through it whole: to be spread over devices, or for its ends.

    Raises:
        MemoryPlanError: less is free than the target has.
    """
    if target_bytes > available_bytes:
        raise MemoryPlanError(
            f"The target has {_gb(target_bytes)} and is loaded into this machine's memory, by one rank at a time, of "
            f"which {_gb(available_bytes)} is free. Free {_gb(target_bytes - available_bytes)} or more, or take a "
            "machine (a pod, a container) with more memory."
        )


def suggest(
    config: TrainConfig, plan: Callable[[TrainConfig], MemoryPlan], device_bytes: int, world_size: int
) -> list[Suggestion]:
    """List the smallest sufficient change of each setting, or its largest where none is sufficient."""
    total = plan(config).total_bytes
    found: list[Suggestion] = []
    for setting, values in _alternatives(config, world_size).items():
        for place, (shown, changed) in enumerate(values):
            needed = plan(changed).total_bytes
            if needed > device_bytes and place < len(values) - 1:
                continue
            if needed < total:
                before = _shown(config, setting)
                found.append(Suggestion(setting, before, shown, total - needed, needed <= device_bytes))
            break
    return sorted(found, key=lambda one: (not one.fits, -one.saved_bytes))


def suggest_together(
    config: TrainConfig, plan: Callable[[TrainConfig], MemoryPlan], device_bytes: int, world_size: int
) -> list[Suggestion]:
    """List changes that fit when all are made: those first that change what is learnt the least; empty if none do."""
    made: list[Suggestion] = []
    order = ("topology.shard_target", "sharding", "recompute", "loss.chunk_blocks", "num_anchors", "pack_tokens")
    for setting in order:
        total = plan(config).total_bytes
        for shown, changed in _alternatives(config, world_size).get(setting, []):
            needed = plan(changed).total_bytes
            if needed >= total:
                continue
            change = Suggestion(setting, _shown(config, setting), shown, total - needed, needed <= device_bytes)
            if change.fits:
                return [*made, change]
        if (strongest := _alternatives(config, world_size).get(setting)) and plan(strongest[-1][1]).total_bytes < total:
            shown, config_after = strongest[-1]
            saved = total - plan(config_after).total_bytes
            made.append(Suggestion(setting, _shown(config, setting), shown, saved, fits=False))
            config = config_after
    return []


def _alternatives(config: TrainConfig, world_size: int) -> dict[str, list[tuple[str, TrainConfig]]]:
    """Settings that save memory, each with its values from mild to strong."""

    def halvings(start: int, low: int) -> list[int]:
        return [value for power in range(1, 12) if (value := start >> power) >= low]

    chunks = [
        (str(blocks), config.model_copy(update={"loss": config.loss.model_copy(update={"chunk_blocks": blocks})}))
        for blocks in halvings(config.loss.chunk_blocks, 1)
    ]
    changes = {
        "loss.chunk_blocks": chunks,
        "recompute": [] if config.recompute else [("true", config.model_copy(update={"recompute": True}))],
        "num_anchors": [
            (str(anchors), config.model_copy(update={"num_anchors": anchors}))
            for anchors in halvings(config.num_anchors, 32)
        ],
        "pack_tokens": [
            (str(tokens), config.model_copy(update={"pack_tokens": tokens}))
            for tokens in halvings(config.pack_tokens, 512)
        ],
    }
    topology = config.topology
    if topology.mode == "split" and topology.target_ranks > 1 and not topology.shard_target:
        spread = topology.model_copy(update={"shard_target": True})
        changes["topology.shard_target"] = [("true", config.model_copy(update={"topology": spread}))]
    if world_size > 1 and config.sharding != "fsdp":
        changes["sharding"] = [("fsdp", config.model_copy(update={"sharding": "fsdp"}))]
    return changes


def _shown(config: TrainConfig, setting: str) -> str:
    value: object = config
    for name in setting.split("."):
        value = getattr(value, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
