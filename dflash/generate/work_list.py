"""Which prompts of a run have no record yet, and what each is asked as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash.errors import UsageError
from dflash.generate.changes import name_changes
from dflash.generate.config import GenerateRun
from dflash.generate.parts import BatchLog, short_hash
from dflash.generate.prompt_source import MAX_NAMED, PromptSource, open_prompts, require_apart
from dflash.generate.prompts import Prompt, digest_of
from dflash.generate.requests import Request, make_request
from dflash.generate.spool import Spool
from dflash.storage import S3Credentials


@dataclass(slots=True)
class WorkList:
    """The prompts of a run against what the batch and the spool hold.

    Attributes:
        run: the run.
        prompts: read once already.
        ids: digests of their ids.
        log: the batch.
        spool: finished records that no part holds yet.
        thinks_by_default: see `Request`.
    """

    run: GenerateRun
    prompts: PromptSource
    ids: set[bytes]
    log: BatchLog
    spool: Spool
    thinks_by_default: bool | None = None
    _spooled: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, run: GenerateRun, log: BatchLog, spool: Spool, credentials: S3Credentials | None) -> WorkList:
        """Read all prompts once.

        Raises:
            UsageError: prompts that can't be used; names them.
        """
        require_apart(run.prompts, run.batch)
        prompts = open_prompts(run.prompts, spool.folder / "prompts", credentials, strip_answers=run.strip_answers)
        return cls(run, prompts, prompts.check(), log, spool)

    def missing(self) -> set[bytes]:
        """Ids without a record in the batch."""
        return self.ids - self.log.done.keys()

    def look_into_spool(self) -> None:
        """Note which records wait in the open file of the spool."""
        self._spooled = {digest_of(look["id"]): short_hash(look["request"]) for look in self.spool.open_looks()}

    def unasked(self) -> set[bytes]:
        """Ids without a record in batch or spool."""
        return self.missing() - self._spooled.keys()

    def requests(self, model: str, only: set[bytes] | None = None) -> Iterator[Request]:
        """Requests of prompts without a record.

        Args:
            model: the name that the servers know.
            only: digests of the ids to ask; None for all.
        """
        for prompt, known in self._known():
            if known is None and (only is None or digest_of(prompt.id) in only):
                yield self._request(prompt, model)

    def require_unchanged(self, model: str) -> None:
        """Hold the request of each prompt that has a record to the one that made the record.

        Raises:
            UsageError: they differ; names ids and what differs.
        """
        changed: list[Request] = []
        num_changed = 0
        for prompt, known in self._known():
            if known is None:
                continue
            request = self._request(prompt, model)
            if known != short_hash(request.hash):
                num_changed += 1
                changed += [request][: MAX_NAMED - len(changed)]
        if changed:
            raise self._refusal(changed, num_changed)

    def _known(self) -> Iterator[tuple[Prompt, bytes | None]]:
        """Each prompt, and the hash of the request that made its record."""
        for prompt in self.prompts:
            digest = digest_of(prompt.id)
            yield prompt, self.log.done.get(digest, self._spooled.get(digest))

    def _request(self, prompt: Prompt, model: str) -> Request:
        return make_request(prompt, self.run, model, thinks_by_default=self.thinks_by_default)

    def _refusal(self, changed: list[Request], num_changed: int) -> UsageError:
        first = changed[0]
        record = self.log.find(first.prompt.id) or next(
            (one for one in self.spool.open_records() if one["id"] == first.prompt.id), None
        )
        differs = ", ".join(name_changes(record, first)) if record else ""
        names = ", ".join(repr(request.prompt.id) for request in changed)
        return UsageError(
            f"{num_changed} of {len(self.ids)} prompts have a record in {self.run.batch} that was asked otherwise: "
            f"{names}{' and more' if num_changed > len(changed) else ''}.\n"
            f"{first.prompt.id!r} differs in: {differs or 'its request hash'}.\n"
            "A batch holds one answer for an id. Take the same prompts and parameters again, or generate into a new "
            "folder; `dflash regenerate` asks again for records that lack something."
        )
