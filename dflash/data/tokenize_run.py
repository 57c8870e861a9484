"""The steps from a folder of completions to a published first version, without an orchestrator.

Each step is one method that flows call from tasks and a notebook calls in turn; `tokenize_dataset` is that sequence.
What a step leaves is immutable and named by its content or fingerprint, so every step may be repeated.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, Self

from dflash.config import TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.merge_plan import holds_batch
from dflash.data.plan import CODE_VERSION, PlannedFile, ShardPlan, list_completions, plan_shards, require_apart
from dflash.data.pool import TokenizePool
from dflash.data.quality import assess, baseline_of, enforce
from dflash.data.quality_report import Baseline, QualityReport
from dflash.data.report import render_html
from dflash.data.shard_files import ShardFiles, Spool
from dflash.data.shards import SCHEMA_VERSION
from dflash.data.spool import REJECTS_FILE, LocalInput, ShardJob, read_spooled
from dflash.data.stored_shards import ShardIndexes, is_of, put_in_place, whole_receipts
from dflash.data.workspace import Workspace, make_download_folder, shards_with_rows
from dflash.errors import DatasetError, PublishConflictError
from dflash.manifest import (
    Counts,
    Manifest,
    ShardReceipt,
    TokenizerRecord,
    batch_fingerprint,
    batch_from_receipts,
    sha256_hex,
)
from dflash.storage import S3Credentials, Store, open_store

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer

EXAMPLES_PER_REASON = 10
UPLOADS_AT_ONCE = 8  # each may hold a shard of up to 32 MiB in memory
# Building and proving the fast encoder costs a run 4 to 8 CPU-s; the reference does 0.9 MB of text in one.
MIN_BYTES_FOR_FAST_ENCODER = 6_000_000


class TokenizeSession:
    """One run over one source: its stores, its tokenizer, its warm processes.

    Use as a context manager: leaving it ends the processes.
    """

    def __init__(self, run: TokenizeRun, credentials: S3Credentials | None, workspace: Workspace) -> None:
        self.run = run
        self.source: Store = open_store(run.source, credentials)
        self.root = DatasetRoot.open(run.dataset, credentials, workspace.cache)
        self.pool = TokenizePool(run.tokenizer, run.num_workers, trust_remote_code=run.trust_remote_code)
        self._workspace = workspace
        self._encoder: Literal["auto", "huggingface"] = run.encoder
        self._downloads = make_download_folder(workspace)
        self._numbers = itertools.count()
        self._upload_slots = threading.BoundedSemaphore(UPLOADS_AT_ONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.pool.close()
        shutil.rmtree(self._downloads, ignore_errors=True)

    def plan(self) -> list[ShardPlan]:
        """List the source and decide the shards; refuse a root that can't be published to.

        Raises:
            UsageError: the source holds no completions.
            ConditionalWriteError: the store of the root can't swap a pointer safely.
            TokenizerError: the tokenizer can't be used.
        """
        require_apart(self.source.uri, self.root.uri)
        self.root.store.probe_conditional_writes()
        plans = plan_shards(
            list_completions(self.source),
            self.run,
            self.tokenizer_record().fingerprint,
            self.tokenizer_record().template_fingerprint,
        )
        if sum(plan.num_bytes for plan in plans) < MIN_BYTES_FOR_FAST_ENCODER:
            self._encoder = "huggingface"
        return plans

    def require_free_root(self, plans: Iterable[ShardPlan]) -> None:
        """Refuse, before any work, a root that holds something else than this batch.

        Raises:
            DatasetError: the root holds a version made from something else; merging is another command.
        """
        current = self.root.current()
        if current is not None:
            self._require_same_batch(current, [plan.fingerprint for plan in plans])

    def _require_same_batch(self, current: Manifest, shard_fingerprints: Sequence[str]) -> None:
        if batch_fingerprint(shard_fingerprints) not in {batch.fingerprint for batch in current.batches}:
            raise DatasetError(
                f"{self.root.uri} already holds {current.name} ({current.counts.num_rows} rows), "
                f"which was not made from {self.run.source}. To add a batch use `dflash merge`; to start anew "
                "name another dataset root."
            )

    def finished(self, plans: Iterable[ShardPlan]) -> dict[str, ShardReceipt]:
        """Receipts, by fingerprint, of shards that the store or this machine's spool holds whole."""
        wanted = {plan.fingerprint: plan for plan in plans}
        stored = whole_receipts(self.root, wanted)
        found = {name: receipt for name, receipt in stored.items() if is_of(receipt, wanted[name])}
        for fingerprint in wanted.keys() - found.keys():
            receipt = read_spooled(self.spool / fingerprint)
            if receipt is not None:
                found[fingerprint] = receipt
        return found

    def download(self, files: Sequence[PlannedFile]) -> list[LocalInput]:
        """Fetch files, pinned to what was listed; a local source is read in place."""
        places = [self.source.local_path(item.info.key) for item in files]
        in_place = [_local_input(item, place) for item, place in zip(files, places, strict=True) if place is not None]
        if in_place:  # a store has paths for all or for none
            return in_place
        fetched = [(item.info, self._download_path(item.info.key)) for item in files]
        return [
            LocalInput(info.key, path, info.size, info.etag, transfer.sha256, is_own=True)
            for (info, path), transfer in zip(fetched, self.source.download_all(fetched), strict=True)
        ]

    def _download_path(self, key: str) -> Path:
        """Numbered, since a key may be longer than a file name may."""
        suffix = "".join(PurePosixPath(key).suffixes[-2:])
        return self._downloads / f"{next(self._numbers):07d}{suffix}"

    @property
    def spool(self) -> Path:
        """Finished shards of this dataset; runs into other datasets have their own."""
        return self._workspace.spool / sha256_hex(self.root.uri.encode())[:12]

    @property
    def scratch(self) -> Path:
        """A folder of this session alone, which is removed with it."""
        return self._downloads

    def files(self) -> ShardFiles:
        """Where shards of the batch and of the dataset are read."""
        return ShardFiles(self.root, Spool(self.spool, self.scratch / "links"))

    def tokenize(self, plan: ShardPlan, inputs: Iterable[LocalInput]) -> ShardReceipt:
        """Make one shard in the pool; its downloads are removed afterwards.

        Raises:
            DatasetError: every record was rejected.
            ShardFailedError: the process died under it.
        """
        local = tuple(inputs)
        receipt = self.pool.run(ShardJob(plan.fingerprint, local, self.run.options, self.spool, self._encoder))
        for item in local:
            if item.is_own:
                item.path.unlink(missing_ok=True)
        return receipt

    def assess(self, receipts: Sequence[ShardReceipt]) -> QualityReport:
        """Judge the whole batch by the indexes of its shards."""
        reasons = batch_from_receipts(self.run.source, receipts).reject_reasons
        return assess(
            ShardIndexes([receipt.shard for receipt in receipts], self.files().index),
            reject_reasons=reasons,
            num_records=sum(receipt.num_records for receipt in receipts),
            thresholds=self.run.gate,
            baseline=self._baseline(),
            reject_examples=self._reject_examples(receipts),
        )

    def _baseline(self) -> Baseline | None:
        current = self.root.current()
        return None if current is None else baseline_of(current.quality)

    def _reject_examples(self, receipts: Iterable[ShardReceipt]) -> dict[str, list[str]]:
        """Up to ten `file:line` for each reject reason."""
        examples: dict[str, list[str]] = collections.defaultdict(list)
        for receipt in receipts:
            if receipt.rejects_sha256 is not None:
                for line in self._rejects_of(receipt).splitlines():
                    reject = json.loads(line)
                    if len(examples[reject["reason"]]) < EXAMPLES_PER_REASON:
                        examples[reject["reason"]].append(f"{reject['file']}:{reject['line']}")
        return dict(examples)

    def _rejects_of(self, receipt: ShardReceipt) -> bytes:
        with contextlib.suppress(FileNotFoundError):  # another run may put it in place and clear the spool
            return (self.spool / receipt.shard.fingerprint / REJECTS_FILE).read_bytes()
        return self.root.meta.read(f"rejects/{receipt.rejects_sha256}.jsonl", sha256=receipt.rejects_sha256)

    def upload(self, receipt: ShardReceipt) -> None:
        """Put shard, index, rejects and, last, the receipt in place, instead of damaged ones. Repeating is harmless.

        Raises:
            IntegrityError: the spooled files are not what the receipt says, or the store holds another shard for it.
        """
        with self._upload_slots:
            put_in_place(self.root, receipt, self.spool)

    def bytes_uploaded(self) -> int:
        """Bytes this session has sent to the dataset so far."""
        return sum(store.counters.snapshot().bytes_up for store in (self.root.store, self.root.meta))

    def is_spooled(self, receipt: ShardReceipt) -> bool:
        """Whether the shard waits on this machine for its upload."""
        return (self.spool / receipt.shard.fingerprint).is_dir()

    def publish_first(self, receipts: Sequence[ShardReceipt], report: QualityReport) -> Manifest:
        """Publish version 1; the same batch published before, or by a faster run just now, is found and returned.

        Raises:
            DatasetError: the root holds a version made from something else; merging is another command.
            PublishConflictError: another publisher won with something else.
        """
        fingerprints = [receipt.shard.fingerprint for receipt in receipts]
        current = self.root.current()
        if current is not None:
            self._require_same_batch(current, fingerprints)
            return current
        manifest = self.first_manifest(receipts, report)
        try:
            self.root.publish(manifest, expected=None)
        except PublishConflictError:
            winner = self.root.current()
            if winner is None or not holds_batch(winner, batch_fingerprint(fingerprints)):
                raise
            return winner
        return manifest

    def save_report(self, report: QualityReport, name: str) -> str:
        """Keep the report as a page beside the dataset; return its URI. A batch that was refused has one too."""
        page = render_html(report, title=f"{name}: {self.run.source}").encode()
        key = f"reports/{name}-{sha256_hex(page)[:12]}.html"
        self.root.meta.put_if_absent(key, page)
        return f"{self.root.meta.uri}/{key}"

    def first_manifest(self, receipts: Sequence[ShardReceipt], report: QualityReport) -> Manifest:
        """Manifest of version 1 over these shards, in plan order."""
        shards = shards_with_rows(receipts)
        return Manifest(
            version=1,
            parent=None,
            created_at=datetime.now(UTC).replace(microsecond=0),
            schema_version=SCHEMA_VERSION,
            code_version=CODE_VERSION,
            tokenizer=self.tokenizer_record(),
            options=self.run.options,
            shards=shards,
            batches=(batch_from_receipts(self.run.source, receipts),),
            counts=Counts.of(shards),
            quality=report.model_dump(mode="json"),
            gate_override_reason=None if report.passed else self.run.gate.override_reason,
        )

    def tokenizer_record(self) -> TokenizerRecord:
        """What the manifest keeps about the tokenizer.

        Raises:
            TokenizerError: it can't be used.
        """
        return self.pool.tokenizer

    @cached_property
    def tokenizer(self) -> TargetTokenizer:
        """The tokenizer in this process, for what isn't done in the pool; the pool has proven it."""
        from dflash.data.tokenizer import load_tokenizer  # brings transformers, which few runs need in this process

        name = self.tokenizer_record().name
        return load_tokenizer(name, trust_remote_code=self.run.trust_remote_code, probe=False)


def _local_input(item: PlannedFile, path: Path) -> LocalInput:
    return LocalInput(item.info.key, path, item.info.size, item.info.etag, item.identity.removeprefix("sha256:"))


def tokenize_dataset(run: TokenizeRun, credentials: S3Credentials | None, workspace: Workspace) -> Manifest:
    """All steps in one process with its pool; what the flow does, for notebooks and tests.

    Raises:
        GateError: the batch is not fit to train on; nothing was published.
        DflashError: see the steps.
    """
    with TokenizeSession(run, credentials, workspace) as session:
        plans = session.plan()
        session.require_free_root(plans)
        receipts = session.finished(plans)
        missing = [plan for plan in plans if plan.fingerprint not in receipts]
        with ThreadPoolExecutor(session.pool.num_workers + 1) as threads:
            made = threads.map(lambda plan: session.tokenize(plan, session.download(plan.files)), missing)
            receipts |= {receipt.shard.fingerprint: receipt for receipt in made}
        ordered = [receipts[plan.fingerprint] for plan in plans]
        report = session.assess(ordered)
        enforce(report, run.gate)
        for receipt in filter(session.is_spooled, ordered):
            session.upload(receipt)
        return session.publish_first(ordered, report)
