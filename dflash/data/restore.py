"""Rebuild a lost or damaged root from its mirror, or a new root from another one's mirror."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from dflash.data.copying import Progress, copy_version, mark_of, put_current, silent
from dflash.data.dataset import INFO_KEY, POINTER_KEY, DatasetRoot
from dflash.data.saved_format import dataset_info, datasets_state
from dflash.errors import (
    DatasetError,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionError,
    PublishConflictError,
)
from dflash.manifest import Manifest, PointerMove, PointerRecord, canonical_json, sha256_hex

# What damage looks like. Other failures of a store may pass, and must not be taken for a loss.
_DAMAGE = (DatasetError, ObjectNotFoundError, IntegrityError)


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """What a restore did; bytes are those of shards and indexes.

    Attributes:
        manifest: name of the version that is current now.
        shards_mended: shards that lay there damaged and were replaced.
        versions: names of all versions that the pointer's history holds now, so that a rollback finds them.
        lost: versions that the root's history named and of which neither root has the manifest.
        left_out: manifests that lie in the root and that no history names: of publishers that lost or were killed, or
            newer than the last backup if the pointer was lost. One is taken by its name.
    """

    target: str
    manifest: str
    shards_kept: int
    shards_copied: int
    shards_mended: int
    bytes_copied: int
    versions: tuple[str, ...]
    lost: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For `--json` and artifacts."""
        return asdict(self)


def restore_version(
    mirror: DatasetRoot,
    root: DatasetRoot,
    version: int | str | None = None,
    progress: Progress = silent,
    *,
    check: bool = False,
) -> RestoreRecord:
    """Make a root whole again from its mirror, and a version of it current.

    Works on a root of which anything is lost or damaged, `state.json` included, and on an empty one. All versions that
    the mirror holds are in the history afterwards. Repeating it finishes what a crash left open.

    Args:
        mirror: the backup.
        root: what to rebuild.
        version: number or name; None for the root's current version, or the newest backup where the root's pointer
            is gone. It never goes back to an older version unasked.
        progress: called with shards done and shards in all.
        check: read every shard of the root through and compare digests, not sizes alone.

    Raises:
        DatasetError: there is no such version, or a shard of it is whole in neither root.
        IntegrityError: the mirror's copy is damaged.
        PublishConflictError: the root was published to meanwhile.
    """
    remains = _Remains.of(root)
    if remains.mark is None:
        root.store.probe_conditional_writes()
    moves = _join_histories(remains.record, mirror)
    manifests = _find_manifests(moves, root, mirror)
    name = _choose(version, remains, mirror, moves, root)
    target = manifests[name] if name in manifests else _unpublished(root, mirror, name)
    counts = copy_version(mirror, root, target, progress, check=check)
    put_current(root.store, INFO_KEY, dataset_info())
    for other in manifests:
        _put_manifest(root, mirror, other)
    kept = tuple(move for move in moves if move.manifest in manifests)
    _point(root, target, kept, remains)
    names = tuple(dict.fromkeys([*(move.manifest for move in kept), target.name]))
    stored = {info.key.removeprefix("manifests/").removesuffix(".json") for info in root.store.list("manifests")}
    return RestoreRecord(
        target=root.uri,
        manifest=target.name,
        **asdict(counts),
        versions=names,
        lost=tuple(dict.fromkeys(move.manifest for move in moves if move.manifest not in manifests)),
        left_out=tuple(sorted(stored - set(names))),
    )


@dataclass(frozen=True, slots=True)
class _Remains:
    """What is left of a root's pointer.

    Attributes:
        mark: what replacing `state.json` must match, whether it can be read or not; None where it is gone.
        record: our part of it; None where that can't be read.
        state: all of it as JSON; empty where it can't be read.
    """

    mark: str | None
    record: PointerRecord | None
    state: Mapping[str, Any]

    @classmethod
    def of(cls, root: DatasetRoot) -> _Remains:
        """Read it.

        Raises:
            DatasetError: the place holds a saved dataset that never was ours.
        """
        mark = mark_of(root.store, POINTER_KEY)
        if mark is None:
            return cls(None, None, {})
        try:
            state = json.loads(root.store.read(POINTER_KEY))
            if "dflash" in state:
                record = PointerRecord.from_bytes(canonical_json(state["dflash"]), f"{root.uri}/{POINTER_KEY}")
                return cls(mark, record, state)
        except (ValueError, TypeError, *_DAMAGE):
            return cls(mark, None, {})
        if not root.store.list("manifests"):
            raise DatasetError(
                f"{root.uri} holds a saved dataset that is not one of ours, and restoring would take its place. "
                "Name the dataset's own root, or an empty one."
            )
        return cls(mark, None, {})


def _join_histories(record: PointerRecord | None, mirror: DatasetRoot) -> tuple[PointerMove, ...]:
    """The root's own history, and the backups of versions that it doesn't know, by time."""
    pointer = mirror.pointer()
    own = () if record is None else record.history
    known = {move.manifest for move in own}
    backups = () if pointer is None else pointer.record.history
    return tuple(sorted([*own, *(move for move in backups if move.manifest not in known)], key=lambda move: move.at))


def _find_manifests(moves: Iterable[PointerMove], root: DatasetRoot, mirror: DatasetRoot) -> dict[str, Manifest]:
    """The manifests of all versions that can be read in either root, by name."""
    found: dict[str, Manifest] = {}
    for name in dict.fromkeys(move.manifest for move in moves):
        for place in (root, mirror):
            try:
                found[name] = _read_manifest(place, name)
                break
            except _DAMAGE:
                continue
    return found


def _choose(
    version: int | str | None,
    remains: _Remains,
    mirror: DatasetRoot,
    moves: tuple[PointerMove, ...],
    root: DatasetRoot,
) -> str:
    """Name of the version that is to be current."""
    if version is None and remains.record is not None:
        return remains.record.manifest
    if version is None:
        newest = mirror.pointer()
        if newest is None:
            raise DatasetError(
                f"{mirror.uri} holds no backup, and {root.uri} has no readable pointer. Name the place of the backup."
            )
        return newest.record.manifest
    for move in reversed(moves):
        if version in (move.version, str(move.version), move.manifest):
            return move.manifest
    if f"manifests/{version}.json" in {info.key for info in root.store.list("manifests")}:
        return str(version)
    known = ", ".join(dict.fromkeys(move.manifest for move in moves)) or "none"
    raise DatasetError(f"Neither {root.uri} nor {mirror.uri} has a version {version}. Known: {known}.")


def _unpublished(root: DatasetRoot, mirror: DatasetRoot, name: str) -> Manifest:
    """A manifest that no history names, or that the history names and no root has any more."""
    try:
        return _read_manifest(root, name)
    except _DAMAGE as error:
        raise DatasetError(
            f"The manifest of {name} is whole neither in {root.uri} nor in {mirror.uri}, so that version is lost. "
            "Name another backup, or an older version with --to."
        ) from error


def _read_manifest(place: DatasetRoot, name: str) -> Manifest:
    """A manifest by name, without the pointer.

    Raises:
        DatasetError: it is damaged.
        ObjectNotFoundError: it is missing.
    """
    key = f"manifests/{name}.json"
    manifest = Manifest.from_bytes(place.store.read(key), f"{place.uri}/{key}")
    if manifest.name != name:
        raise DatasetError(f"{place.uri}/{key} was altered: its content gives the name {manifest.name}.")
    return manifest


def _put_manifest(root: DatasetRoot, mirror: DatasetRoot, name: str) -> None:
    """Put the mirror's manifest in place unless the root has a sound one; the bytes stay as they were published."""
    try:
        _read_manifest(root, name)
    except _DAMAGE:
        key = f"manifests/{name}.json"
        put_current(root.store, key, mirror.store.read(key))


def _point(root: DatasetRoot, manifest: Manifest, moves: tuple[PointerMove, ...], remains: _Remains) -> None:
    """Replace the pointer if it is still what was found; nothing where it says all this already."""
    sha256 = sha256_hex(root.store.read(manifest.key))
    record = PointerRecord(manifest=manifest.name, manifest_sha256=sha256, version=manifest.version, history=moves)
    wanted = datasets_state(manifest)
    if remains.record == record and all(remains.state.get(key) == value for key, value in wanted.items()):
        return
    now = datetime.now(UTC).replace(microsecond=0)
    move = PointerMove(manifest=manifest.name, version=manifest.version, at=now, action="restore")
    record = record.model_copy(update={"history": (*moves, move)})
    data = canonical_json(wanted | {"dflash": record.model_dump(mode="json")})
    try:
        root.store.replace(POINTER_KEY, data, if_match=remains.mark)
    except PreconditionError as error:
        raise PublishConflictError(
            f"{manifest.name} was not restored in {root.uri}: another publisher replaced the pointer meanwhile.\n"
            "What was copied is kept. Look with `dflash versions` and run the restore again if it is still wanted."
        ) from error
