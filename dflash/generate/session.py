"""One run of a batch: what is left to do, the records, what a rerun finds, and when the batch is complete."""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from dflash.data.prompting import opens_thinking
from dflash.data.tokenizer import load_tokenizer
from dflash.errors import UsageError
from dflash.generate.answers import Failure
from dflash.generate.client import Client, find_model, open_session
from dflash.generate.config import GenerateRun
from dflash.generate.endpoints import EndpointPool
from dflash.generate.engine import Engine, Tally
from dflash.generate.outcome import Outcome
from dflash.generate.part_index import FORMAT_VERSION, PART_BYTES
from dflash.generate.parts import BATCH_LIMITS, BatchLog
from dflash.generate.progress import GenerateProgress, RateMeter
from dflash.generate.prompt_source import open_prompts
from dflash.generate.prompts import digest_of
from dflash.generate.requests import Dialect, OpenAIDialect, Request, SGLangDialect
from dflash.generate.spool import Spool
from dflash.generate.uploads import Uploads, upload
from dflash.generate.work_list import WorkList
from dflash.storage import S3Credentials, join_uri, open_store

Listener = Callable[[GenerateProgress], None]


class GenerateSession:
    """A run of a batch, used as a context.

    Args:
        run: its parameters.
        api_key: sent to every endpoint.
        work: local folder for spools and copies of prompts.
        credentials: of the object store.
        listener: told the progress twice a second, from another thread.

    Attributes:
        run: its parameters.
        stop: set it to end the run early; what is done is kept.
        log: the batch.
    """

    def __init__(
        self,
        run: GenerateRun,
        api_key: str | None,
        work: Path,
        credentials: S3Credentials | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.run = run
        self.stop = threading.Event()
        self.log = BatchLog(open_store(run.batch, credentials, BATCH_LIMITS))
        self._api_key = api_key
        self._credentials = credentials
        self._listener = listener
        self._spool = Spool(work, run.batch, run.part_records, PART_BYTES)
        self._failed: set[bytes] = set()
        self._progress = GenerateProgress()

    def __enter__(self) -> Self:
        self._spool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._spool.__exit__(*exc)

    def plan(self) -> int:
        """Read prompts and batch; return how many prompts have no record yet.

        Raises:
            UsageError: prompts that can't be used, or a store that doesn't hold what a batch needs.
            DamagedDatasetError: the batch isn't what was written.
        """
        self._list = WorkList.read(self.run, self.log, self._spool, self._credentials)
        self.log.store.probe_conditional_writes()
        self._tell(step="reading the batch", num_prompts=len(self._list.ids))
        was_complete = self.log.is_complete()  # asked first: another run may complete it while it is listed
        self.log.load()
        if was_complete:
            self.log.require_published()
        self._upload_full()
        left = len(self._list.missing())
        # A closed batch without `_SUCCESS` is one whose run was stopped in between: this one writes it, if it would.
        may_finish = not was_complete and left / len(self._list.ids) <= self.run.max_failed_share
        if left and (was_complete or self.log.is_closed) and not may_finish:
            raise self._too_late(left)
        return left

    def generate(self) -> Outcome:
        """Make the records that are missing; close the batch where nothing is left to ask.

        Raises:
            ServiceError: the servers don't answer, or refuse this run; what is done is kept.
            StorageError: the store failed; what is done is kept.
            DamagedDatasetError: a part isn't what was written.
            UsageError: an id that is done belongs to another request now; nothing was asked.
        """
        start = time.monotonic()
        self._spool.forget_failures()
        self._upload_full()
        self._list.look_into_spool()
        self._failed.clear()
        tally = Tally()
        if self._list.unasked() and not self.log.is_closed:
            tally = asyncio.run(self._generate())
        else:
            self._upload_rest()
        outcome = self._outcome(tally, self._put_failures(), time.monotonic() - start)
        if outcome.may_complete(self.run) and not self.log.is_complete():
            self.log.verify()
            self.log.close()
        return self._outcome(tally, outcome.failures, time.monotonic() - start)

    def finish(self, outcome: Outcome, report: dict[str, Any] | None = None) -> Outcome:
        """Write `_SUCCESS` where every prompt has a record or failed within the limit.

        Raises:
            DatasetError: too many prompts failed, or some were not tried; says how to go on.
            UsageError: another run has completed the batch without prompts of this one.
        """
        is_complete = self.log.is_complete()
        if (is_complete or self.log.is_closed) and not outcome.may_complete(self.run):
            raise self._too_late(outcome.num_failed + outcome.num_open)
        if not is_complete:
            outcome.require_complete(self.run)
            self.log.put_success(self._summary(outcome) | ({} if report is None else {"report": report}))
        shutil.rmtree(self._spool.folder / "prompts", ignore_errors=True)
        return replace(outcome, is_complete=True)

    def _too_late(self, left: int) -> UsageError:
        failed = self._failure_list()
        return UsageError(
            f"{self.run.batch} is complete, and {left} of {len(self._list.ids)} prompts have no record in it. Others "
            f"may have read it: generate them into a new folder{f', with {failed} as prompts' if failed else ''}."
        )

    def _outcome(self, tally: Tally, failures: str | None, seconds: float) -> Outcome:
        missing = self._list.missing()
        # What is missing from a batch that another run closed was given up there.
        num_failed = len(missing if self.log.is_closed else missing & self._failed)
        return Outcome(
            is_complete=False,
            num_prompts=len(self._list.ids),
            num_records=len(self.log.done),
            num_new=tally.num_new,
            num_failed=num_failed,
            num_open=len(missing) - num_failed,
            failures=failures or (self._failure_list() if num_failed else None),
            tries=tally.num_tries,
            kinds=dict(tally.kinds),
            output_tokens=tally.num_tokens,
            seconds=round(seconds, 2),
        )

    def _summary(self, outcome: Outcome) -> dict[str, Any]:
        counts = self.log.counts
        return {
            "format_version": FORMAT_VERSION,
            "num_prompts": outcome.num_prompts,
            "num_records": counts.num_records,
            "num_failed": outcome.num_failed,
            "failures": outcome.failures,
            "failed_tries": outcome.kinds,
            "output_tokens": counts.output_tokens,
            "prompt_tokens": counts.prompt_tokens,
            "finish_reasons": dict(counts.finishes),
            "run": self.run.model_dump(mode="json"),
            "parts": [part.to_json() for part in self.log.parts],
        }

    async def _generate(self) -> Tally:
        dialect = self._dialect()
        async with open_session(self._api_key, self.run.max_in_flight) as session:
            model = self.run.model or await find_model(session, self.run.endpoints)
            num_parts = self._require_unchanged(model)
            only = self._failed_before() if self.run.only_failed else None
            pool = EndpointPool(self.run.endpoints, self.run.max_in_flight)
            engine = Engine(self.run, Client(session, dialect, self.run.request_timeout_s), pool, self, self.stop)
            num_before = len(self._list.ids) - len(self._list.unasked())
            show = functools.partial(self._tick, engine, pool, RateMeter(), time.monotonic(), num_before)
            self._uploads = Uploads(self.log, self._spool)
            try:
                requests = self._list.requests(model, only)
                has_answers = bool(self.log.done or self._spool.num_open)
                await self._uploads.run_beside(engine.run(requests, show, has_answers=has_answers))
            finally:
                await self._uploads.finish()
                show()
        if len(self.log.parts) > num_parts + self.log.num_own:  # another run works at this batch too
            self._require_unchanged(model)
        return engine.tally

    def _require_unchanged(self, model: str) -> int:
        """Compare requests where there are records; return how many parts others made."""
        if self.log.done or self._spool.num_open:
            self._tell(step="comparing requests")
            self._list.require_unchanged(model)
        return len(self.log.parts) - self.log.num_own

    def _upload_rest(self) -> None:
        """Nothing is left to ask, so that no server is needed: compare, and upload what the spool holds."""
        record = self.log.first_record() or next(self._spool.open_records(), None)
        model = self.run.model or (record or {}).get("model")
        if model is not None:
            self._require_unchanged(str(model))
        last = self._spool.close_part()
        if last is not None:
            upload(self.log, last)

    def _dialect(self) -> Dialect:
        """How the servers are asked; a tokenizer also tells whether the target thinks where nobody says."""
        if self.run.tokenizer is None:
            if self.run.api == "sglang":
                raise UsageError("api = sglang needs `tokenizer`: prompts are rendered and encoded here.")
            return OpenAIDialect()
        tokenizer = load_tokenizer(self.run.tokenizer)
        self._list.thinks_by_default = opens_thinking(tokenizer, self.run.template_kwargs)
        return SGLangDialect(tokenizer) if self.run.api == "sglang" else OpenAIDialect()

    async def add(self, record: dict[str, Any]) -> None:
        """Keep a finished record (see `engine.Sink`)."""
        await self._uploads.keep(record)

    def give_up(self, request: Request, failure: Failure, attempts: int) -> None:
        """Note a prompt that failed (see `engine.Sink`)."""
        why = {"kind": failure.kind, "message": failure.message, "attempts": attempts}
        self._spool.give_up(request.prompt.to_json() | {"failure": why})
        self._failed.add(digest_of(request.prompt.id))

    def _upload_full(self) -> None:
        """Bring to the store what a kill or a failure left on the disk."""
        for path in self._spool.full():
            upload(self.log, path)

    def _failed_before(self) -> set[bytes]:
        uri = self._failure_list()
        if uri is None:
            raise UsageError(f"{self.run.batch} has no list of failed prompts: run without only_failed.")
        return open_prompts(uri, self._spool.folder / "prompts", self._credentials).check()

    def _failure_list(self) -> str | None:
        key = self.log.last_failures()
        return None if key is None else join_uri(self.run.batch, key)

    def _put_failures(self) -> str | None:
        data = self._spool.failures()
        return join_uri(self.run.batch, self.log.put_failures(data)) if data else None

    def _tick(self, engine: Engine, pool: EndpointPool, meter: RateMeter, start: float, num_before: int) -> None:
        tally, now = engine.tally, time.monotonic()
        records_per_s, tokens_per_s = meter.rates(now, tally.num_new, tally.num_tokens)
        self._tell(
            step="generating",
            num_done=min(len(self._list.ids), num_before + tally.num_new),
            num_new=tally.num_new,
            num_failed=tally.num_failed,
            in_flight=pool.in_flight,
            limit=pool.limit,
            num_tokens=tally.num_tokens,
            tokens_per_s=tokens_per_s,
            records_per_s=records_per_s,
            seconds=now - start,
            kinds=dict(tally.kinds),
        )

    def _tell(self, **values: Any) -> None:
        self._progress = replace(self._progress, **values)
        if self._listener is not None:
            self._listener(self._progress)
