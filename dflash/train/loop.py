"""The training loop: data in, steps, checkpoints, metrics, and an orderly end.

Exact resume: the order of the data and all random choices are functions of the seed and of where the run is, the
learning rate of how much is done, and the rest is in the checkpoint. On a CPU N steps equal k steps, a stop, and N-k
steps bit for bit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash.data.batches import BatchOrder, BatchState, Pack, ShardSource, Share, rank_share
from dflash.data.prefetch import prefetch
from dflash.errors import IntegrityError, PeerLostError, TrainingError, UsageError
from dflash.model.drafter import Drafter
from dflash.model.export import check_tensors
from dflash.train.checkpoint import CheckpointFolder, Snapshot, load
from dflash.train.checkpoint_record import OPTIMIZER, TAKE_OLDER
from dflash.train.config import TrainConfig
from dflash.train.engine import Engine, StepReport
from dflash.train.environment import fingerprint
from dflash.train.feature_source import ComputedFeatures, FeatureModel, FeatureSource
from dflash.train.hooks import Hooks, TrainResult
from dflash.train.metrics import MetricsWriter
from dflash.train.progress import Progress
from dflash.train.ramp_up import ramp_up
from dflash.train.replay import Features
from dflash.train.resume import check_resumable
from dflash.train.sharding import full_state, load_full_state
from dflash.train.vocabulary import LossVocabulary, count_written_ids
from dflash.train.warm_start import warm_start
from dflash.train.world import World, losing_a_rank

CHECKPOINTS = "checkpoints"

# Tokens that a warm start measures averages on, at the least.
WARM_START_TOKENS = 1000


def order_of(config: TrainConfig) -> BatchOrder:
    """The order of a run's packs."""
    return BatchOrder(config.seed, config.pack_tokens, config.window_rows, config.num_epochs)


class Run:
    """One training run in a folder; made anew it goes on from the newest checkpoint there.

    Args:
        config: of the run; a resumed run must have the same, except for its end and its checkpoints.
        target: frozen, on the device to train on; or a source that gives its features from elsewhere.
        drafter: built for it; its weights are overwritten where a checkpoint exists.
        source: the shards.
        run_dir: checkpoints, metrics, TensorBoard.
        hooks: see there.

    Raises:
        TrainingError: the environment changed since the checkpoint and `accept_env_change` is off.
        UsageError: the settings can't go together, or differ from the checkpoint's.
        IncompatibleError: the checkpoint was trained on other data.
        IntegrityError: the checkpoint is damaged, or isn't one of this drafter.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: FeatureModel | FeatureSource,
        drafter: Drafter,
        source: ShardSource,
        run_dir: Path,
        hooks: Hooks | None = None,
    ) -> None:
        self.config = config
        self._source = source
        self._run_dir = run_dir
        self._hooks = hooks or Hooks()
        self._world = self._hooks.world or World.current()
        if config.replay.max_bytes and self._world.size > 1:
            raise UsageError("Replay keeps features of one rank only. Set replay.max_bytes to 0, or use one rank.")
        self._folder = CheckpointFolder(run_dir / CHECKPOINTS, config.keep_checkpoints, self._hooks.upload)
        self.progress = Progress()
        latest = self._folder.latest()
        snapshot = None if latest is None else load(latest)
        if snapshot is not None:
            check_resumable(snapshot.record, config, self._hooks.identity, fingerprint(), run_dir)
        final = config.loss.objective == "kl"
        given = target if isinstance(target, FeatureSource) else ComputedFeatures(target, final=final)
        ends = given.ends
        device = ends.head_VH.device
        features = Features(given, config.replay, device)
        drafter.to(device)
        begins_warm = config.warm_start and snapshot is None
        vocabulary = None
        if begins_warm or config.loss_vocab_size is not None:
            counts_V = count_written_ids(source, drafter.config.vocab_size)
            vocabulary = self._vocabulary(counts_V, ends.head_VH)
            if begins_warm:
                assert not isinstance(target, FeatureSource)  # the configuration allows it for `colocated` alone
                self._warm_start(drafter, target, counts_V)
        self.engine = Engine(config, drafter, ends, features, self._world, vocabulary)
        if snapshot is not None:
            self._restore(snapshot, str(latest))
        self._last_loss: float | None = None

    def train(self) -> TrainResult:
        """Train to the end, or until asked to stop.

        Raises:
            TrainingError: too many rows weren't finite, or memory ran out twice; the newest checkpoint is kept.
        """
        metrics = MetricsWriter(self._run_dir, self.progress.step) if self._world.is_first else None
        self.engine.drafter.train()
        try:
            with losing_a_rank():
                ramp_up(self.engine, order_of(self.config).packs(self._source, self.progress.batch), self._hooks.memory)
            status = self._steps(metrics)
            checkpoint = self._save()
        except BaseException as error:
            if isinstance(error, PeerLostError):
                self._save_alone(error)
            self._finish_uploads(error)
            raise
        finally:
            if metrics is not None:
                metrics.close()
        self._folder.close()
        done = self.progress
        return TrainResult(
            status, done.step, checkpoint, self._last_loss, done.skipped_rows, done.seconds, self.engine.halved
        )

    def _finish_uploads(self, error: BaseException) -> None:
        """Wait for the checkpoints that are being uploaded; an error of theirs must not hide why the run ended."""
        try:
            self._folder.close()
        except TrainingError as second:
            error.add_note(str(second))

    def _steps(self, metrics: MetricsWriter | None) -> Literal["finished", "stopped"]:
        config = self.config
        status: Literal["finished", "stopped"] = "stopped"
        packs = order_of(config).packs(self._source, self.progress.batch)
        shares = prefetch(rank_share(packs, self._world.rank, self._world.size), depth=2 * config.accumulation)
        features = self.engine.features
        try:
            ahead = deque(islice(shares, config.accumulation + config.topology.lookahead(config.accumulation)))
            while self._done_share(self.progress) < 1 and ahead:
                current = [ahead.popleft() for _ in range(min(config.accumulation, len(ahead)))]
                features.prepare([share.pack for share in (*current, *ahead)])
                saved_rounds = self.progress.step // config.checkpoint_every
                with losing_a_rank():
                    stopped = self._round(current, metrics)
                if stopped:
                    break
                if self.progress.step // config.checkpoint_every > saved_rounds:
                    self._save()
                ahead.extend(islice(shares, config.accumulation))
            else:
                status = "finished"
        except BaseException as error:
            features.close(error)
            raise
        finally:
            shares.close()
        features.close()
        return status

    def _round(self, shares: list[Share], metrics: MetricsWriter | None) -> bool:
        """Make a step of fresh packs, then the replay steps; return whether to stop.

        A checkpoint holds whole rounds, so a stop waits for the replay steps of its round.
        """
        stop = self._step([share.pack for share in shares], "fresh", shares[-1].after, metrics)
        for number in range(self.config.replay.steps):
            key = f"replay/{self.progress.step}/{number}"
            drawn = self.engine.features.draw(self.config.pack_tokens, self.config.accumulation, key)
            if not drawn or self._done_share(self.progress) >= 1:
                break
            self._step(drawn, key, self.progress.batch, metrics)
        return stop

    def _step(self, packs: Sequence[Pack | None], key: str, after: BatchState, metrics: MetricsWriter | None) -> bool:
        started, cpu_started = time.monotonic(), time.process_time()
        done = self.progress
        ahead = replace(done, step=done.step + 1, batch=after)
        middle = (self._done_share(done) + self._done_share(ahead)) / 2
        report = self.engine.step(packs, key, min(middle, 1.0), stop=self._hooks.should_stop())
        ahead.seconds += self._world.first_value(time.monotonic() - started)
        ahead.cpu_seconds += time.process_time() - cpu_started
        ahead.skipped_rows += int(report.sums["skipped_rows"])
        self.progress = ahead
        self._report(report, metrics, key)
        if ahead.skipped_rows > self.config.max_skipped_rows:
            raise TrainingError(
                f"{ahead.skipped_rows} rows gave NaN or infinity up to step {ahead.step}, the limit is "
                f"{self.config.max_skipped_rows}. The newest checkpoint, {self._folder.latest()}, is kept. Look at "
                "grad_norm and loss in metrics.jsonl; lower the learning rate, or raise max_skipped_rows."
            )
        return report.sums["stop"] > 0

    def _done_share(self, progress: Progress) -> float:
        """Return how much of the run is done, by whichever of its ends is nearest."""
        config, shares = self.config, [0.0]
        if config.num_epochs is not None:
            shares.append(progress.batch.num_tokens / (sum(self._source.num_tokens) * config.num_epochs))
        if config.max_steps is not None:
            shares.append(progress.step / config.max_steps)
        if config.max_seconds is not None:
            shares.append(progress.seconds / config.max_seconds)
        return max(shares)

    def _report(self, report: StepReport, metrics: MetricsWriter | None, key: str) -> None:
        sums, done = report.sums, self.progress
        loss = sums["numerator"] / sums["weight"] if sums["weight"] else math.nan
        self._last_loss = loss if math.isfinite(loss) else None  # JSON has no NaN
        accuracy, accuracy_L = sums.accuracy()
        row = {
            "step": done.step,
            "epoch": done.batch.epoch,
            "done": round(min(self._done_share(done), 1.0), 6),
            "loss": self._last_loss,
            "accuracy": accuracy,
            "grad_norm": report.grad_norm,
            "learning_rate": report.rate,
            "tokens": int(sums["tokens"]),
            "anchors": int(sums["anchors"]),
            "skipped_rows": done.skipped_rows,
            "seconds": done.seconds,
            "cpu_seconds": done.cpu_seconds,
            "halved": self.engine.halved,
            "replayed": key != "fresh",
            "slot_accuracy": [round(value, 4) for value in accuracy_L],
        }
        if self._hooks.memory is not None:
            row |= self._hooks.memory.numbers()
        if metrics is not None:
            metrics.write(row)
            if self._hooks.on_step is not None:
                self._hooks.on_step(row)

    def _save(self) -> Path:
        """Write a checkpoint on rank 0; all ranks wait for it."""
        with losing_a_rank():
            self._write()
        self._world.barrier()
        latest = self._folder.latest()
        assert latest is not None
        return latest

    def _save_alone(self, error: PeerLostError) -> None:
        """Save the last whole step although another rank is gone; sharded weights went with it."""
        sharded = self.config.sharding == "fsdp" and self._world.size > 1
        if not self._world.is_first or sharded or not self.progress.step:
            return
        try:
            self._write()
            error.add_note(f"step {self.progress.step} was saved")
        except Exception as second:  # noqa: BLE001 (why the run ends is more important)
            error.add_note(f"step {self.progress.step} could not be saved: {second}")

    def _write(self) -> None:
        engine = self.engine
        weights, optimizer = full_state(engine.drafter, engine.optimizer)
        if not self._world.is_first:
            return
        record = {
            "progress": self.progress.to_json(),
            "config": self.config.model_dump(mode="json"),
            "drafter": engine.drafter.config.model_dump(mode="json"),
            "halved": engine.halved,
            "environment": fingerprint(),
            "memory": None if self._hooks.memory is None else self._hooks.memory.to_json(),
            "data": None if self._hooks.identity is None else self._hooks.identity.to_json(),
        }
        state = {"optimizer": optimizer, "replay": engine.features.state_dict()}
        self._folder.save(Snapshot(self.progress.step, weights, state, record))

    def _restore(self, snapshot: Snapshot, where: str) -> None:
        engine, state = self.engine, snapshot.optimizer
        self.progress = Progress.of(snapshot.record, where)
        self.progress.check_place(order_of(self.config), self._source, where)
        check_tensors(snapshot.weights, engine.drafter.config, where)
        if bad := [name for name, tensor in snapshot.weights.items() if not bool(tensor.isfinite().all())]:
            raise IntegrityError(f"{where}: {len(bad)} weights aren't finite, such as {bad[0]}. {TAKE_OLDER}")
        try:
            load_full_state(engine.drafter, engine.optimizer, snapshot.weights, state["optimizer"])
            engine.features.load_state_dict(state["replay"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # whatever doesn't fit
            raise IntegrityError(
                f"{OPTIMIZER} of checkpoint {where} isn't one of this drafter: {error!r}. {TAKE_OLDER}"
            ) from error
        engine.halved = snapshot.record["halved"]

    def _vocabulary(self, counts_V: npt.NDArray[np.int64], head_VH: Tensor) -> LossVocabulary | None:
        size = self.config.loss_vocab_size
        return None if size is None or size >= len(head_VH) else LossVocabulary.of(counts_V, size, head_VH)

    def _warm_start(self, drafter: Drafter, target: FeatureModel, counts_V: npt.NDArray[np.int64]) -> None:
        """Set the initial weights by the first rows of the data, a thousand tokens or more."""
        order = BatchOrder(self.config.seed, self.config.pack_tokens, self.config.window_rows, 1)
        packs: list[Pack] = []
        for pack in order.packs(self._source):
            packs.append(pack)
            if sum(one.num_tokens for one in packs) >= WARM_START_TOKENS:
                break
        warm_start(drafter, target, packs, torch.from_numpy(counts_V))
        self._world.spread(drafter.parameters())  # replicas must be equal, and each rank's device rounds on its own
