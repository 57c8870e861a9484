"""A whole training run: from its parameters to checkpoints at its output.

Runs in each rank. Nothing is loaded before version, environment and memory are checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash.data.batches import BatchState
from dflash.data.copying import put_current
from dflash.data.dataset import DatasetRoot
from dflash.data.thinking import count_thinking
from dflash.data.tokenizer import load_tokenizer
from dflash.data.version_shards import VersionShards
from dflash.errors import TokenizerError
from dflash.manifest import Manifest
from dflash.model.features import Target
from dflash.model.target_files import target_fingerprint
from dflash.storage import S3Credentials, join_uri, open_store, parse_uri
from dflash.storage.files import os_errors_as_storage_errors
from dflash.train.checkpoint import CheckpointFolder
from dflash.train.checkpoint_record import read_record
from dflash.train.checkpoint_store import CheckpointStore
from dflash.train.config import TrainConfig
from dflash.train.curves import METRICS, PICTURE, plot_metrics
from dflash.train.device_memory import check_device, target_shape
from dflash.train.environment import fingerprint
from dflash.train.hooks import Hooks, TrainResult
from dflash.train.launch import run_dir_of
from dflash.train.loop import CHECKPOINTS, Run, order_of
from dflash.train.memory_watch import MemoryWatch
from dflash.train.output_lease import LeaseTimes, OutputLease, hold_output, place_of
from dflash.train.preflight import Prepared, prepare
from dflash.train.progress import Progress
from dflash.train.resume import DataIdentity, TargetIdentity, check_resumable
from dflash.train.run import RESULT, TrainRun
from dflash.train.run_lock import hold_folder
from dflash.train.seats import Seat
from dflash.train.server_features import FeatureServer, ServerFeatures
from dflash.train.setup import build_drafter, load_ends
from dflash.train.split_drafter import ReceivedFeatures
from dflash.train.split_run import Beginning, run_target_rank
from dflash.train.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run finds and keeps things on this machine.

    Attributes:
        work: folder for run folders whose output is on S3, and for downloads.
        credentials: for S3; None takes the client's own chain.
    """

    work: Path
    credentials: S3Credentials | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """How a caller follows a run; see `dflash.train.loop.Hooks`."""

    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[dict[str, Any]], None] | None = None


def train_run(run: TrainRun, places: Places, watch: Watch, device: torch.device) -> dict[str, Any]:
    """Train, or go on, until the end or until asked to stop.

    Args:
        run: the parameters.
        places: folders and credentials.
        watch: stop and progress.
        device: of this rank.

    Returns:
        JSON: how it ended, where the newest checkpoint is, and on what it was trained.

    Raises:
        TrainingError: memory, environment or numbers stop the run, or it is running already, here or elsewhere.
        UsageError: parameters that can't go together, also with the checkpoint's.
        DflashError: data, target or store can't be used; see `prepare`.
    """
    world, run_dir = World.current(), run_dir_of(run.output, places.work)
    ready = prepare(run, DatasetRoot.open(run.dataset, places.credentials, places.work / "cache"))
    with os_errors_as_storage_errors(str(run_dir)), _alone(run, places, world) as lease:
        mirror = _mirror(run, places)
        if world.is_first:
            _bring_up_to_date(mirror, run_dir)
        world.barrier()
        dtype = target_dtype(run, device)
        identity = DataIdentity.of(run.dataset, ready.manifest, identify_target(run, dtype))
        _guard(run_dir, ready, identity)
        seat = Seat.take(ready.config.topology)
        shape = target_shape(ready.text_config, dtype, trust_remote_code=run.trust_remote_code)
        memory = check_device(ready, shape, device, seat)
        source = _open_shards(run, places, ready.manifest, world)
        layers, trusted = ready.network.target_layer_ids, run.trust_remote_code

        def load(where: torch.device) -> Target:
            return Target.load(run.target, layers, where, dtype, trust_remote_code=trusted)

        if seat.target_number is not None:
            beginning = Beginning(source, _beginning(run_dir, ready.config, source))
            run_target_rank(seat, ready.config, load, device, beginning)
            memory.report("of this target rank")
            return {}
        if world.is_first:
            identity = replace(identity, thinking=thinking_mix(run, ready.manifest, source))
        hooks = Hooks(_may_stop(watch, lease), _upload(mirror, lease), watch.on_step, identity, seat.trainers, memory)
        target = load(device) if seat.role == "colocated" else _remote(run, ready, seat, device, dtype)
        ends = target if isinstance(target, Target) else target.ends
        drafter = build_drafter(ready.config, ready.network, ends, seat.trainers)
        result = Run(ready.config, target, drafter, source, run_dir, hooks).train()
        memory.report("at the end")
        if result.status == "finished":
            source.close()
        if lease is not None:
            lease.renew()
        return _finish(run, places, result, identity, memory) if world.is_first else {}


def thinking_mix(run: TrainRun, manifest: Manifest, source: VersionShards) -> dict[str, int]:
    """Count the first rows by thinking mode, where the target's folder has the tokenizer that made them."""
    try:
        tokenizer = load_tokenizer(run.target, trust_remote_code=run.trust_remote_code, probe=False)
    except TokenizerError as error:
        log.info("the checkpoints won't say in which thinking mode the rows were sampled: %s", error)
        return {}
    if tokenizer.fingerprint != manifest.tokenizer.fingerprint:
        log.warning(
            "the tokenizer of the target %s (fingerprint %s) isn't the one that made %s (%s, fingerprint %s): check "
            "that equal texts get equal ids",
            *(run.target, tokenizer.fingerprint[:12], manifest.name, manifest.tokenizer.name),
            manifest.tokenizer.fingerprint[:12],
        )
        return {}
    first = next(index for index, rows in enumerate(source.num_rows) if rows)
    return count_thinking(source.fetch(first), source.num_rows[first], tokenizer)


def use_device(run: TrainRun, device: torch.device) -> None:
    """Set this process up for a rank: its device, or where the target runs in the background half of its cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif run.train.replay.in_background:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))


def target_dtype(run: TrainRun, device: torch.device) -> torch.dtype:
    """What the target is loaded as."""
    names: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return names.get(run.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)


def identify_target(run: TrainRun, dtype: torch.dtype) -> TargetIdentity:
    """Describe the target, so that a resumed run is refused another one."""
    return TargetIdentity(run.target, target_fingerprint(run.target), str(dtype).removeprefix("torch."))


def _mirror(run: TrainRun, places: Places) -> CheckpointStore | None:
    if parse_uri(run.output).scheme == "file":
        return None
    store = open_store(join_uri(run.output, CHECKPOINTS), places.credentials)
    return CheckpointStore(store, run.train.keep_checkpoints)


def _bring_up_to_date(mirror: CheckpointStore | None, run_dir: Path) -> None:
    """Make the newest checkpoint be both here and at the output, wherever it is now."""
    folder = run_dir / CHECKPOINTS
    latest = CheckpointFolder(folder).latest()
    if mirror is None:
        return
    here = -1 if latest is None else int(latest.name.removeprefix("step-"))
    there = max(mirror.steps(), default=-1)
    if there > here:
        log.info("taking checkpoint %d from %s", there, mirror.store.uri)
        mirror.fetch(there, folder)
        mirror.fetch_metrics(there, run_dir)
    elif latest is not None and here > there:
        log.info("uploading checkpoint %d, which an earlier run didn't finish", here)
        mirror.upload(latest)


def _guard(run_dir: Path, ready: Prepared, identity: DataIdentity) -> None:
    """Refuse to go on from a checkpoint of something else before the target is loaded."""
    latest = CheckpointFolder(run_dir / CHECKPOINTS).latest()
    if latest is not None:
        check_resumable(read_record(latest), ready.config, identity, fingerprint(), run_dir)


def _remote(
    run: TrainRun, ready: Prepared, seat: Seat, device: torch.device, dtype: torch.dtype
) -> ReceivedFeatures | ServerFeatures:
    """The source of features that are computed elsewhere."""
    network, topology = ready.network, ready.config.topology
    if seat.peers is not None:
        kl = ready.config.loss.objective == "kl"
        return ReceivedFeatures(seat, device, network.feature_size, final=kl)
    assert topology.server_url is not None
    assert topology.server_folder is not None
    layers, trusted = network.target_layer_ids, run.trust_remote_code
    ends = load_ends(
        lambda: Target.load(run.target, layers, "cpu", dtype, trust_remote_code=trusted), seat.trainers, device
    )
    model, folder = topology.server_model or run.target, Path(topology.server_folder)
    server = FeatureServer(topology.server_url, model, folder, topology.peer_timeout_s)
    return ServerFeatures(server, ends, len(layers))


def _beginning(run_dir: Path, config: TrainConfig, source: VersionShards) -> BatchState:
    """Where the order goes on: as the newest checkpoint says, else at its beginning."""
    latest = CheckpointFolder(run_dir / CHECKPOINTS).latest()
    if latest is None:
        return BatchState()
    progress = Progress.of(read_record(latest), str(latest))
    progress.check_place(order_of(config), source, str(latest))
    return progress.batch


def _finish(
    run: TrainRun, places: Places, result: TrainResult, identity: DataIdentity, memory: MemoryWatch
) -> dict[str, Any]:
    """Draw the curves, write the summary beside them, and put both to the output; leave no second copy there."""
    run_dir = run_dir_of(run.output, places.work)
    plot_metrics(run_dir, run_dir / PICTURE)
    step = result.checkpoint.name
    summary = asdict(result) | {
        "output": run.output,
        "run_dir": str(run_dir),
        "checkpoint": join_uri(run.output, CHECKPOINTS, step),
        "data": identity.to_json(),
        "memory": memory.to_json(),
    }
    text = json.dumps(summary, indent=1, sort_keys=True) + "\n"
    (run_dir / RESULT).write_text(text, encoding="utf-8")
    if parse_uri(run.output).scheme == "s3":
        store = open_store(run.output, places.credentials)
        for name in (METRICS, PICTURE, RESULT):
            put_current(store, name, (run_dir / name).read_bytes())
        if result.status == "finished":
            shutil.rmtree(run_dir / CHECKPOINTS)  # whole at the output; a few of them fill a disk
    return summary


def _open_shards(run: TrainRun, places: Places, manifest: Manifest, world: World) -> VersionShards:
    root = DatasetRoot.open(run.dataset, places.credentials, places.work / "cache")
    place = hashlib.sha256(str(run_dir_of(run.output, places.work)).encode()).hexdigest()[:16]
    return VersionShards(root, manifest, places.work / "shards" / f"{place}-{world.rank}", run.shard_cache_bytes)


@contextmanager
def _alone(run: TrainRun, places: Places, world: World) -> Iterator[OutputLease | None]:
    """Keep other trainers out of the run's folder, and out of its output on S3; rank 0 does it for all."""
    if not world.is_first:
        yield None
        return
    run_dir = run_dir_of(run.output, places.work)
    with hold_folder(run_dir, run.stop_grace_s):
        for kind in (".building-*", ".fetching-*"):  # of writes and downloads that were cut
            for leftover in run_dir.glob(f"{CHECKPOINTS}/{kind}"):
                shutil.rmtree(leftover)
        if parse_uri(run.output).scheme == "file":
            yield None
            return
        store = open_store(run.output, places.credentials)
        with hold_output(store, place_of(run_dir), LeaseTimes(run.stop_grace_s)) as lease:
            yield lease


def _may_stop(watch: Watch, lease: OutputLease | None) -> Callable[[], bool]:
    return lambda: watch.should_stop() or (lease is not None and lease.lost)


def _upload(mirror: CheckpointStore | None, lease: OutputLease | None) -> Callable[[Path], None] | None:
    if mirror is None or lease is None:
        return None

    def upload(path: Path) -> None:
        lease.renew()  # right before: whoever lost the output writes nothing there
        mirror.upload(path)

    return upload
