"""What a run was made of, and whether it may go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.errors import IncompatibleError, TrainingError, UsageError
from dflash.manifest import Manifest
from dflash.train.checkpoint_record import require_sections
from dflash.train.config import TrainConfig
from dflash.train.environment import Difference, difference_table, differences

# Settings that a resumed run may change: when it ends, what it keeps, how it computes; not what it computes.
_MAY_CHANGE = frozenset(
    {
        *("num_epochs", "max_steps", "max_seconds", "max_skipped_rows", "checkpoint_every", "keep_checkpoints"),
        *("accept_env_change", "attention", "sharding", "accumulation", "recompute"),
        *("topology", "ramp_up"),
    }
)
# The same inside a table: in which order sums are made, and in which thread features.
_MAY_CHANGE_INSIDE = {"loss": "chunk_blocks", "replay": "in_background"}


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """The target of a run.

    Attributes:
        name: folder or id.
        fingerprint: of its weights and configuration (`dflash.model.target_files`).
        dtype: that its weights and features have.
    """

    name: str
    fingerprint: str
    dtype: str


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """The data and the target of a run; kept in each checkpoint, and by it in the model card of an export.

    Attributes:
        dataset: root of the dataset.
        version: number of the version.
        manifest: its name, which holds the start of its digest.
        manifest_digest: SHA-256 over content and settings of the version.
        num_rows: of the version.
        tokenizer_fingerprint: of the tokenizer that made the ids.
        template_fingerprint: of its chat template.
        thinking: the first rows by thinking mode (`dflash.data.thinking`); empty where nothing tells.
        target: folder or id.
        target_fingerprint: see `TargetIdentity`.
        target_dtype: see `TargetIdentity`.
    """

    dataset: str
    version: int
    manifest: str
    manifest_digest: str
    num_rows: int
    tokenizer_fingerprint: str
    template_fingerprint: str
    thinking: dict[str, int]
    target: str
    target_fingerprint: str
    target_dtype: str

    @classmethod
    def of(cls, dataset: str, manifest: Manifest, target: TargetIdentity) -> DataIdentity:
        """Describe a run over a version; nobody has looked for thinking yet."""
        return cls(
            dataset=dataset,
            version=manifest.version,
            manifest=manifest.name,
            manifest_digest=manifest.digest,
            num_rows=manifest.counts.num_rows,
            tokenizer_fingerprint=manifest.tokenizer.fingerprint,
            template_fingerprint=manifest.tokenizer.template_fingerprint,
            thinking={},
            target=target.name,
            target_fingerprint=target.fingerprint,
            target_dtype=target.dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


# The same bytes may be known by another path on another machine, and a mode is only told where a tokenizer is at hand;
# what was read is compared by digest.
_NOT_COMPARED = frozenset({"dataset", "target", "thinking"})

# Another target's features mean something else to the drafter, and so do those of other rounding.
_OF_THE_TARGET = ("target_fingerprint", "target_dtype")


def check_resumable(
    record: Mapping[str, Any], config: TrainConfig, identity: DataIdentity | None, here: Mapping[str, str], run: Path
) -> None:
    """Check that a run may go on from a checkpoint.

    Args:
        record: of the checkpoint.
        config: of the run now.
        identity: of the run now; None where the caller doesn't say what it trains on.
        here: the environment's fingerprint.
        run: the run folder, for messages.

    Raises:
        TrainingError: the environment changed and `accept_env_change` is off.
        UsageError: settings differ that decide what is computed.
        IncompatibleError: the data or the target differs.
        IntegrityError: the record lacks what a run needs.
    """
    require_sections(record, ("environment", "config"), f"of {run}")
    changes = differences(record["environment"], dict(here))
    if changes and not config.accept_env_change:
        raise TrainingError(
            "The environment changed since the checkpoint, so the run may not go on as it was:\n"
            f"{difference_table(changes)}\nSet accept_env_change (--accept-env-change) to go on all the same."
        )
    before, now = _deciding(record["config"]), _deciding(config.model_dump(mode="json"))
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        pairs = ", ".join(f"{name}: {before.get(name)!r} -> {now[name]!r}" for name in changed)
        raise UsageError(
            f"The run in {run} was made with other settings ({pairs}), so it can't go on with these. "
            "Use the old settings, or another run folder."
        )
    _check_identity(record.get("data"), identity, run)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a resumed run must have as it began."""
    kept = {name: value for name, value in config.items() if name not in _MAY_CHANGE}
    for table, name in _MAY_CHANGE_INSIDE.items():
        if isinstance(values := kept.get(table), Mapping):
            kept[table] = {key: value for key, value in values.items() if key != name}
    return kept


def _check_identity(before: Mapping[str, Any] | None, identity: DataIdentity | None, run: Path) -> None:
    if before is None or identity is None:
        return
    now = identity.to_json()
    changed = [name for name in now if name not in _NOT_COMPARED and before.get(name) != now[name]]
    if target := [name for name in changed if name in _OF_THE_TARGET]:
        names = ("target", *target)
        table = [Difference(name, str(before.get(name, "absent")), str(now[name])) for name in names]
        raise IncompatibleError(
            f"The run in {run} was trained for another target, so it can't go on with this one:\n"
            f"{difference_table(table)}\nGive the target (and the dtype) that it began with, or use another output."
        )
    if changed:
        pairs = "\n".join(f"  {name}: {before.get(name)!r} -> {now[name]!r}" for name in changed)
        raise IncompatibleError(
            f"The run in {run} was trained on other data, so it can't go on with this:\n{pairs}\n"
            f"Set version to {before['manifest']} to go on with that, or use another output to train on this."
        )
