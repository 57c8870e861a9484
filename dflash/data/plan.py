"""Which files make which shard, decided from the listing alone, before a byte is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash.config import TokenizeOptions, TokenizeRun
from dflash.data.shards import ROWS_PER_BATCH, SCHEMA_VERSION
from dflash.errors import UsageError
from dflash.manifest import fingerprint_of
from dflash.storage import ObjectInfo, Store

# Raised whenever the same input and options would give other rows than before.
CODE_VERSION = 1
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A listed input file and the mark of its content: `etag:...` on S3, `sha256:...` in a folder."""

    info: ObjectInfo
    identity: str


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to make: its number in the run, its files in order, and the fingerprint of what it will hold."""

    number: int
    files: tuple[PlannedFile, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """Name in tables, task runs and the `tokenize-shard` form, such as `shard-00007`."""
        return f"shard-{self.number:05d}"

    @property
    def num_bytes(self) -> int:
        """Input bytes, as stored."""
        return sum(item.info.size for item in self.files)


def require_apart(source: str, dataset: str) -> None:
    """Refuse a dataset in its source, which would be read as completions, and a source in a dataset, which is garbage.

    Raises:
        UsageError: one of the two URIs lies inside the other.
    """
    source = _absolute(source)
    for place in (_absolute(dataset + suffix) for suffix in ("", ".meta", ".backups", ".backups.meta")):
        if (place + "/").startswith(source + "/") or (source + "/").startswith(place + "/"):
            raise UsageError(
                f"The dataset {place} and the source {source} lie inside one another: the reject files of the one "
                "would be read as completions by the other. Name a dataset root outside."
            )


def list_completions(source: Store) -> list[PlannedFile]:
    """All completion files below the source, sorted by key.

    Raises:
        UsageError: there is none; names the prefix and what else lies there.
    """
    listed = source.list("")
    files = [item for item in listed if item.key.endswith(SUFFIXES)]
    if not files:
        others = f"{len(listed)} other objects, first {listed[0].key}" if listed else "nothing"
        what = "an S3 prefix" if "://" in source.uri else "a local folder; for S3 write s3://bucket/prefix"
        raise UsageError(
            f"No completions under {source.uri}, which is read as {what}.\n"
            f"  expected: files ending in {', '.join(SUFFIXES)}\n  found:    {others}\nCheck the name."
        )
    return [PlannedFile(item, source.identify(item)) for item in files]


def plan_shards(
    files: list[PlannedFile], run: TokenizeRun, tokenizer_fingerprint: str, template_fingerprint: str
) -> list[ShardPlan]:
    """Group files, in key order, into shards.

    Files appended behind the others leave all shards but the last as they were, so those are reused.
    """
    groups = [files[start : start + run.files_per_shard] for start in range(0, len(files), run.files_per_shard)]
    return [
        ShardPlan(
            number,
            tuple(group),
            shard_fingerprint(group, run.options, tokenizer_fingerprint, template_fingerprint),
        )
        for number, group in enumerate(groups)
    ]


def shard_fingerprint(
    files: list[PlannedFile], options: TokenizeOptions, tokenizer_fingerprint: str, template_fingerprint: str
) -> str:
    """Hash over everything that decides the bytes of a shard; equal fingerprints mean equal shards."""
    return fingerprint_of(
        {
            "files": [[item.info.key, item.info.size, item.identity] for item in files],
            "options": options.model_dump(mode="json"),
            "tokenizer": tokenizer_fingerprint,
            "template": template_fingerprint,
            "schema_version": SCHEMA_VERSION,
            "rows_per_batch": ROWS_PER_BATCH,
            "code_version": CODE_VERSION,
        }
    )


def _absolute(uri: str) -> str:
    """One spelling of a place: local paths resolved, S3 URIs without a slash at the end."""
    return uri.rstrip("/") if "://" in uri else str(Path(uri).resolve())
