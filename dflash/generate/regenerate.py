"""Finds what a batch or a dataset version should have sampled anew, and writes it as prompts of a new batch.

Records keep their ids, so that merging the new batch with `keep_new` replaces the rows of the old ones.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow.compute as pc

from dflash.data.completions import normalise_record
from dflash.data.dataset import POINTER_KEY, DatasetRoot
from dflash.data.lines import ReadLimits, iter_lines
from dflash.data.plan import SUFFIXES, list_completions
from dflash.data.records import Reason
from dflash.data.shards import read_index
from dflash.data.strict_json import parse_json
from dflash.errors import IntegrityError, ObjectNotFoundError, RecordError, UsageError
from dflash.generate.config import MOST_TOKENS, Finding, RegenerateRun
from dflash.generate.parts import BATCH_LIMITS
from dflash.generate.prompts import Prompt, digest_of, read_prompt
from dflash.generate.requests import request_seed
from dflash.storage import ObjectInfo, S3Credentials, Store, join_uri, open_store

PROMPTS_KEY: Final = "_prompts.ndjson"
_LIMITS: Final = ReadLimits()
_MAX_REJECTS_BYTES: Final = 1 << 30
# What another sampling of the same prompt won't change, or what isn't a record at all.
_HOPELESS: Final = frozenset(
    {
        Reason.TEMPLATE_ERROR,
        Reason.NO_LOSS_TOKENS_WITHIN_MAX_SEQ_LEN,
        Reason.NON_TEXT_PART,
        Reason.UNKNOWN_ROLE,
        Reason.NOT_AN_OBJECT,
    }
)


@dataclass(frozen=True, slots=True)
class Search:
    """What was found.

    Attributes:
        prompts: URI of the prompts file; None where nothing was found.
        found: prompts by finding.
        num_records: records that were looked at.
        num_lost: records that are wanted and whose prompt can't be read.
    """

    prompts: str | None
    found: Mapping[Finding, int]
    num_records: int
    num_lost: int

    def to_json(self) -> dict[str, Any]:
        """For `--json` and logs."""
        return {
            "found": dict(self.found),
            "looked_at": self.num_records,
            "without_prompt": self.num_lost,
            "prompts": self.prompts,
        }


def find_prompts(run: RegenerateRun, credentials: S3Credentials | None, cache: Path) -> Search:
    """Look through the source; write what was found into the new batch's folder.

    Raises:
        UsageError: the new folder was begun with other findings, or the source holds no completions.
        PreconditionError: an input file was replaced since the dataset was made.
    """
    search = _Search(run, _open_source(run, credentials, cache))
    batch = open_store(run.generate.batch, credentials, BATCH_LIMITS)
    _require_own(batch, run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts"
        with path.open("wb") as file:
            for prompt in search.prompts(Path(folder)):
                file.write(msgspec.json.encode(prompt.to_json()) + b"\n")
        uri = None
        if search.found:
            uri = join_uri(run.generate.batch, PROMPTS_KEY)
            try:
                batch.put_if_absent(PROMPTS_KEY, path)
            except IntegrityError as error:
                raise UsageError(
                    f"{uri} holds other prompts than were found now: the folder was begun with another source or other "
                    "findings. Give a new one."
                ) from error
    return Search(uri, dict(search.found), search.num_records, search.num_lost)


def _require_own(batch: Store, run: RegenerateRun) -> None:
    """Refuse a folder with completions that this command didn't begin, before anything is written there."""
    keys = {item.key for item in batch.list("")}
    if PROMPTS_KEY not in keys and any(key.endswith(SUFFIXES) for key in keys):
        raise UsageError(
            f"{run.generate.batch} holds completions that weren't regenerated: what is found in {run.source} goes into "
            "a batch of its own. Give a new folder."
        )


@dataclass(slots=True)
class _Source:
    """Files to look through, and what a dataset's own files say about their records."""

    files: list[tuple[Store, ObjectInfo]]
    tiny: set[bytes] | None = None  # digests of sample ids with few loss tokens; None where nobody counted
    rejected: dict[tuple[str, int], str] = field(default_factory=dict)  # reason by file and line


@dataclass(slots=True)
class _Search:
    run: RegenerateRun
    source: _Source
    found: Counter[Finding] = field(default_factory=Counter)
    num_records: int = 0
    num_lost: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def prompts(self, folder: Path) -> Iterator[Prompt]:
        """The prompts to ask again, each id once."""
        for store, info in self.source.files:
            path = folder / "input"
            store.download(info.key, path, expect=info)
            with path.open("rb") as file:
                for line in iter_lines(file, info.key, _LIMITS):
                    if line.error is None and line.data.strip(b" \t\r\xef\xbb\xbf"):
                        yield from self._look(line.data.removeprefix(b"\xef\xbb\xbf"), info.key, line.number)

    def _look(self, data: bytes, file: str, number: int) -> Iterator[Prompt]:
        self.num_records += 1
        try:
            record = parse_json(data)
        except RecordError:
            self.num_lost += "rejected" in self.run.findings
            return
        finding = self._finding(record, file, number)
        if finding is None or finding not in self.run.findings:
            return
        prompt = self._prompt(record, f"{file}:{number}", finding)
        if prompt is None:
            self.num_lost += 1
        elif (digest := digest_of(prompt.id)) not in self._seen:
            self._seen.add(digest)
            self.found[finding] += 1
            yield prompt

    def _finding(self, record: Any, file: str, number: int) -> Finding | None:
        try:
            completion = normalise_record(record, file=file, line=number, is_parsed=True)
        except (RecordError, TypeError, ValueError) as error:
            return _of_reason(error.reason if isinstance(error, RecordError) else Reason.NOT_AN_OBJECT)
        if (reason := self.source.rejected.get((file, number))) is not None:
            return _of_reason(reason)
        if self.source.tiny is None:
            count = completion.output_tokens
            count = len(completion.output_token_ids or ()) or None if count is None else count
            is_tiny = count is not None and count <= self.run.few_tokens
        else:
            is_tiny = digest_of(completion.sample_id) in self.source.tiny
        if is_tiny:
            return "few_tokens"
        return "length" if completion.finish_reason == "length" else None

    def _prompt(self, record: Any, where: str, finding: Finding) -> Prompt | None:
        sampling = record.get("sampling") if isinstance(record.get("sampling"), dict) else {}
        changes = self._changes(sampling, finding)
        messages = record.get("messages") or record.get("conversations")
        fields = {name: record.get(name) for name in ("id", "tools", "chat_template_kwargs", "source")}
        try:
            prompt = read_prompt(fields | {"messages": messages, "sampling": changes}, strip_answers=True)
        except RecordError:
            return None
        return prompt if prompt.id else read_prompt(prompt.to_json() | {"id": where})

    def _changes(self, then: Mapping[str, Any], finding: Finding) -> dict[str, int]:
        """What is asked otherwise than then: room where there was too little, else chance."""
        now = self.run.generate.sampling
        if finding == "length":
            limit = then.get("max_tokens")
            limit = limit if type(limit) is int and limit > 0 else now.max_tokens
            return {"max_tokens": self.run.cut_max_tokens or min(4 * limit, MOST_TOKENS)}
        # A prompt's seed comes from the run's and its id: the same two would give the same answer again.
        return {} if now.seed is None else {"seed": request_seed(now.seed, f"after {then.get('seed')}")}


def _open_source(run: RegenerateRun, credentials: S3Credentials | None, cache: Path) -> _Source:
    store = open_store(run.source, credentials)
    try:
        store.head(POINTER_KEY)
    except ObjectNotFoundError:
        if run.version is not None:
            raise UsageError(f"{run.source} is no dataset root, so it has no version {run.version}.") from None
        return _Source([(store, planned.info) for planned in list_completions(store)])
    root = DatasetRoot.open(run.source, credentials, cache)
    manifest = root.manifest(run.version)
    source = _Source([], tiny=set())
    for batch in manifest.batches:
        inputs = open_store(batch.source, credentials)
        source.files += [(inputs, ObjectInfo(one.key, one.size, one.etag)) for one in batch.inputs]
        for sha256 in batch.rejects:
            source.rejected |= _rejects(root.meta.read(f"rejects/{sha256}.jsonl", max_bytes=_MAX_REJECTS_BYTES))
    for entry in manifest.shards:
        table = read_index(root.fetch_index(entry))
        few = table.filter(pc.less_equal(table["num_loss_tokens"], run.few_tokens))
        assert source.tiny is not None
        source.tiny |= {digest_of(name) for name in few["sample_id"].to_pylist()}
    return source


def _rejects(data: bytes) -> dict[tuple[str, int], str]:
    found = {}
    for line in data.split(b"\n"):
        if line:
            reject = parse_json(line)
            found[reject["file"], reject["line"]] = reject["reason"]
    return found


def _of_reason(reason: str) -> Finding | None:
    if reason == Reason.EMPTY_RESPONSE:
        return "empty"
    if reason == Reason.TOO_FEW_LOSS_TOKENS:
        return "few_tokens"
    return None if reason in _HOPELESS else "rejected"
