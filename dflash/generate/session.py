"""One run of a batch: what is left to do, the records, what a rerun finds, and when the batch is complete."""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dflash.data.prompting import opens_thinking
from dflash.data.tokenizer import load_tokenizer
from dflash.errors import DatasetError, UsageError
from dflash.generate.answers import Failure
from dflash.generate.client import Client, find_model, open_session
from dflash.generate.config import GenerateRun
from dflash.generate.endpoints import EndpointPool
from dflash.generate.engine import Engine
from dflash.generate.parts import BATCH_LIMITS, FORMAT_VERSION, PART_BYTES, BatchLog, short_hash
from dflash.generate.progress import GenerateProgress, RateMeter
from dflash.generate.prompts import Prompt, digest_of, open_prompts
from dflash.generate.requests import Dialect, OpenAIDialect, Request, SGLangDialect, make_request
from dflash.generate.spool import Spool
from dflash.storage import S3Credentials, open_store

Listener = Callable[[GenerateProgress], None]
PARTS_AHEAD = 4  # full files that may wait for the store before requests wait too


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        is_complete: `_SUCCESS` is there.
        num_prompts: prompts in all.
        num_records: records in the batch.
        num_new: records that this run made.
        num_failed: prompts that this run gave up.
        num_open: prompts without a record that this run did not give up.
        failures: URI of the list of failed prompts, if any.
        tries: requests made.
        kinds: failed tries by kind.
        output_tokens: of this run.
        seconds: of this run.
    """

    is_complete: bool
    num_prompts: int
    num_records: int
    num_new: int
    num_failed: int
    num_open: int
    failures: str | None
    tries: int
    kinds: dict[str, int]
    output_tokens: int
    seconds: float

    @property
    def failed_share(self) -> float:
        """Failed prompts among all."""
        return self.num_failed / self.num_prompts


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
        self._ids: set[bytes] = set()
        self._thinks_by_default: bool | None = None
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
        """
        self._prompts = open_prompts(
            self.run.prompts, self._spool.folder / "prompts", self._credentials, strip_answers=self.run.strip_answers
        )
        self._ids = self._prompts.check()
        self.log.store.probe_conditional_writes()
        self._tell(step="reading the batch", num_prompts=len(self._ids))
        was_complete = self.log.is_complete()  # asked first: another run may complete it while it is listed
        self.log.load()
        self._upload_full()
        left = len(self._missing())
        if left and was_complete:
            failed = self._failure_list()
            raise UsageError(
                f"{self.run.batch} is complete, and {left} of {len(self._ids)} prompts have no record in it. Others "
                f"may have read it: generate them into a new folder{f', with {failed} as prompts' if failed else ''}."
            )
        return left

    def generate(self) -> Outcome:
        """Make the records that are missing.

        Raises:
            ServiceError: the servers don't answer, or refuse this run; what is done is kept.
            StorageError: the store failed; what is done is kept.
            UsageError: an id that is done belongs to another request now.
        """
        start = time.monotonic()
        self._spool.forget_failures()
        self._upload_full()
        engine = asyncio.run(self._generate()) if self._missing() else None
        tally = None if engine is None else engine.tally
        failures = self._put_failures()
        num_failed = 0 if tally is None else tally.num_failed
        missing = len(self._missing())
        return Outcome(
            is_complete=False,
            num_prompts=len(self._ids),
            num_records=len(self.log.done),
            num_new=0 if tally is None else tally.num_new,
            num_failed=num_failed,
            num_open=missing - num_failed,
            failures=failures,
            tries=0 if tally is None else tally.num_tries,
            kinds={} if tally is None else dict(tally.kinds),
            output_tokens=0 if tally is None else tally.num_tokens,
            seconds=round(time.monotonic() - start, 2),
        )

    def finish(self, outcome: Outcome, report: dict[str, Any] | None = None) -> Outcome:
        """Write `_SUCCESS` where every prompt has a record or failed within the limit.

        Raises:
            DatasetError: too many prompts failed, or some were not tried; says how to go on.
        """
        if not self.log.is_complete():
            self._require_done(outcome)
            self.log.put_success(self._summary(outcome) | ({} if report is None else {"report": report}))
        shutil.rmtree(self._spool.folder / "prompts", ignore_errors=True)
        return replace(outcome, is_complete=True)

    def _require_done(self, outcome: Outcome) -> None:
        if outcome.num_open:
            raise DatasetError(
                f"{outcome.num_open} of {outcome.num_prompts} prompts were not tried in {self.run.batch}: the run was "
                "stopped, or only the failed ones were asked for. Run it again without only_failed."
            )
        if outcome.failed_share > self.run.max_failed_share:
            raise DatasetError(
                f"{outcome.num_failed} of {outcome.num_prompts} prompts failed ({100 * outcome.failed_share:.3f} %, "
                f"allowed {100 * self.run.max_failed_share:.3f} %); failed tries: {outcome.kinds}. {self.run.batch} is "
                f"not complete. They are listed in {outcome.failures}: run this again with --only-failed, or raise "
                "max_failed_share."
            )

    def _summary(self, outcome: Outcome) -> dict[str, Any]:
        counts = self.log.counts
        return {
            "format_version": FORMAT_VERSION,
            "num_prompts": outcome.num_prompts,
            "num_records": counts.num_records,
            "num_failed": outcome.num_failed,
            "failures": outcome.failures,
            "output_tokens": counts.output_tokens,
            "prompt_tokens": counts.prompt_tokens,
            "finish_reasons": dict(counts.finishes),
            "run": self.run.model_dump(mode="json"),
            "parts": [part.to_json() for part in self.log.parts],
        }

    async def _generate(self) -> Engine:
        dialect = self._dialect()
        self._queue: asyncio.Queue[Path] = asyncio.Queue(PARTS_AHEAD)
        async with open_session(self._api_key, self.run.max_in_flight) as session:
            model = self.run.model or await find_model(session, self.run.endpoints)
            pool = EndpointPool(self.run.endpoints, self.run.max_in_flight)
            engine = Engine(self.run, Client(session, dialect, self.run.request_timeout_s), pool, self, self.stop)
            uploader = asyncio.create_task(self._upload_all())
            show = functools.partial(self._tick, engine, pool, RateMeter(), time.monotonic())
            try:
                work = asyncio.create_task(engine.run(self._requests(model), show))
                await asyncio.wait([work, uploader], return_when=asyncio.FIRST_COMPLETED)
                if uploader.done() and not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    uploader.result()
                await work
            finally:
                await self._finish_uploads(uploader)
                show()
        return engine

    def _dialect(self) -> Dialect:
        """How the servers are asked; a tokenizer also tells whether the target thinks where nobody says."""
        if self.run.tokenizer is None:
            if self.run.api == "sglang":
                raise UsageError("api = sglang needs `tokenizer`: prompts are rendered and encoded here.")
            return OpenAIDialect()
        tokenizer = load_tokenizer(self.run.tokenizer)
        self._thinks_by_default = opens_thinking(tokenizer, self.run.template_kwargs)
        return SGLangDialect(tokenizer) if self.run.api == "sglang" else OpenAIDialect()

    async def add(self, record: dict[str, Any]) -> None:
        """Keep a finished record (see `engine.Sink`)."""
        full = self._spool.append(record)
        if full is not None:
            await self._queue.put(full)

    def give_up(self, request: Request, failure: Failure, attempts: int) -> None:
        """Note a prompt that failed (see `engine.Sink`)."""
        why = {"kind": failure.kind, "message": failure.message, "attempts": attempts}
        self._spool.give_up(request.prompt.to_json() | {"failure": why})

    async def _finish_uploads(self, uploader: asyncio.Task[None]) -> None:
        """Upload the parts that wait and the one begun; after an upload that failed they stay in the spool."""
        drained = asyncio.create_task(self._queue.join())
        await asyncio.wait([drained, uploader], return_when=asyncio.FIRST_COMPLETED)
        has_failed = uploader.done()
        drained.cancel()
        uploader.cancel()
        last = self._spool.close_part()
        if has_failed:
            uploader.result()
        if last is not None:
            await asyncio.to_thread(self._upload, last)

    async def _upload_all(self) -> None:
        while True:
            path = await self._queue.get()
            try:
                await asyncio.to_thread(self._upload, path)
            finally:
                self._queue.task_done()

    def _upload_full(self) -> None:
        """Bring to the store what a kill or a failure left on the disk."""
        for path in self._spool.full():
            self._upload(path)

    def _upload(self, path: Path) -> None:
        self.log.append(path)
        path.unlink()

    def _requests(self, model: str) -> Iterator[Request]:
        """Requests of prompts without a record.

        Raises:
            UsageError: an id that is done was asked otherwise.
        """
        spooled = {digest_of(record["id"]): short_hash(record["request_hash"]) for record in self._spool.open_records()}
        only = self._failed_ids() if self.run.only_failed else None
        for prompt in self._prompts:
            digest = digest_of(prompt.id)
            known = self.log.done.get(digest) or spooled.get(digest)
            request = make_request(prompt, self.run, model, thinks_by_default=self._thinks_by_default)
            if known is not None:
                if known != short_hash(request.hash):
                    raise _changed(prompt, self.run.batch)
            elif only is None or digest in only:
                yield request

    def _failed_ids(self) -> set[bytes]:
        uri = self._failure_list()
        if uri is None:
            raise UsageError(f"{self.run.batch} has no list of failed prompts: run without only_failed.")
        return open_prompts(uri, self._spool.folder / "prompts", self._credentials).check()

    def _failure_list(self) -> str | None:
        key = self.log.last_failures()
        return None if key is None else f"{self.run.batch.rstrip('/')}/{key}"

    def _put_failures(self) -> str | None:
        data = self._spool.failures()
        return f"{self.run.batch.rstrip('/')}/{self.log.put_failures(data)}" if data else None

    def _missing(self) -> set[bytes]:
        return self._ids - self.log.done.keys()

    def _tick(self, engine: Engine, pool: EndpointPool, meter: RateMeter, start: float) -> None:
        tally, now = engine.tally, time.monotonic()
        records_per_s, tokens_per_s = meter.rates(now, tally.num_new, tally.num_tokens)
        self._tell(
            step="generating",
            num_done=min(len(self._ids), len(self.log.done) + self._spool.num_open),
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


def _changed(prompt: Prompt, batch: str) -> UsageError:
    return UsageError(
        f"The id {prompt.id!r} has a record in {batch} that was asked with other messages, tools, template arguments, "
        "model or sampling. A batch holds one answer for an id: take the same parameters again, or a new folder."
    )
