"""Manifests, shard receipts and the pointer: the contracts that say what a dataset version is.

```
<root>/state.json                            pointer, the only object ever replaced; load_from_disk reads it
<root>/dataset_info.json                     written once
<root>/shards/<sha256>.arrow                 immutable, content-addressed
<root>/manifests/v000002-<digest12>.json     immutable
<root>.meta/index/<sha256>.arrow             per-row index of a shard, content-addressed
<root>.meta/receipts/<fingerprint>.json      which shard a fingerprint made
<root>.meta/rejects/<sha256>.jsonl           rejected records of a shard, content-addressed
<root>.meta/reports/v000002-<digest12>.html  quality report
```

What `load_from_disk` doesn't need lies outside the root, since it copies all that lies under it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dflash.config import TokenizeOptions
from dflash.errors import DatasetError
from dflash.validation import problems_of

FORMAT_VERSION: Final = 1
# Digests become keys and names of files, so they are nothing else.
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Contract(BaseModel):
    """Base of all stored models: frozen, unknown fields refused, canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, UTF-8, one newline at the end."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse and validate.

        Raises:
            DatasetError: not JSON or not this contract; names `where` and each wrong field.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problems = problems_of(error, "document")
            raise DatasetError(
                f"{where} is not a valid {cls.__name__} (format {FORMAT_VERSION}): {problems}. "
                "It was damaged or written by another version; restore it from a backup or upgrade."
            ) from error


class InputFile(Contract):
    """One input file as it was listed and read; `key` is relative to the batch's source."""

    key: str
    size: int = Field(ge=0)
    etag: str | None
    sha256: Sha256
    num_records: int = Field(ge=0)
    num_rejected: int = Field(ge=0)


class TokenizerRecord(Contract):
    """The tokenizer and template that made the ids; equal fingerprints mean equal ids."""

    name: str
    fingerprint: Sha256
    template_fingerprint: Sha256
    vocab_size: int


class ShardEntry(Contract):
    """One immutable shard: content address, counts, and what it was made from."""

    sha256: Sha256
    num_bytes: int
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    index_sha256: Sha256
    index_bytes: int
    fingerprint: Sha256
    encoder: str

    @property
    def key(self) -> str:
        """Key below the dataset root."""
        return f"shards/{self.sha256}.arrow"

    @property
    def index_key(self) -> str:
        """Key below the metadata root."""
        return f"index/{self.index_sha256}.arrow"


class ShardReceipt(Contract):
    """What tokenizing one group of files gave; stored under the group's fingerprint.

    Holds nothing that differs between two runs over the same input, so writing it twice is harmless.
    """

    format_version: Literal[1] = 1
    shard: ShardEntry
    inputs: tuple[InputFile, ...]
    reject_reasons: dict[str, int]
    rejects_sha256: Sha256 | None

    @property
    def key(self) -> str:
        """Key below the metadata root."""
        return f"receipts/{self.shard.fingerprint}.json"

    @property
    def num_records(self) -> int:
        """Records read, good and rejected."""
        return sum(item.num_records for item in self.inputs)


class Batch(Contract):
    """One tokenized batch of completions: where it came from and what was rejected."""

    source: str
    fingerprint: Sha256
    inputs: tuple[InputFile, ...]
    num_shards: int
    num_rows: int
    num_duplicates: int = 0
    reject_reasons: dict[str, int] = {}
    rejects: tuple[Sha256, ...] = ()


class Counts(Contract):
    """Totals of a version."""

    num_shards: int
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, shards: Iterable[ShardEntry]) -> Counts:
        """Sum over shards."""
        entries = list(shards)
        return cls(
            num_shards=len(entries),
            num_rows=sum(entry.num_rows for entry in entries),
            num_tokens=sum(entry.num_tokens for entry in entries),
            num_loss_tokens=sum(entry.num_loss_tokens for entry in entries),
            num_bytes=sum(entry.num_bytes for entry in entries),
        )


class Manifest(Contract):
    """One dataset version, immutable.

    Invariants: counts equal the sums over `shards`; no shard appears twice; version 1 has no parent.
    """

    format_version: Literal[1] = 1
    version: int = Field(ge=1)
    parent: str | None
    created_at: datetime
    schema_version: int
    code_version: int
    tokenizer: TokenizerRecord
    options: TokenizeOptions
    shards: tuple[ShardEntry, ...]
    batches: tuple[Batch, ...]
    counts: Counts
    quality: dict[str, Any]
    gate_override_reason: str | None = None
    notes: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.counts != Counts.of(self.shards):
            raise ValueError(f"counts {self.counts} differ from the sum over the shards {Counts.of(self.shards)}")
        if self.version == 1 and self.parent is not None:
            raise ValueError(f"version 1 has no parent, found {self.parent}")
        if len({entry.sha256 for entry in self.shards}) != len(self.shards):
            raise ValueError("a shard is named twice")
        return self

    @property
    def digest(self) -> Sha256:
        """SHA-256 over content and settings: the same input gives the same digest anywhere, any day.

        Left out are the date, and the names under which this machine knew things: the tokenizer's folder, the batches'
        sources, the encoders.
        """
        volatile: Any = {
            "created_at": True,
            "shards": {"__all__": {"encoder"}},
            "tokenizer": {"name"},
            "batches": {"__all__": {"source"}},
        }
        return sha256_hex(canonical_json(self.model_dump(mode="json", exclude=volatile)))

    @property
    def name(self) -> str:
        """Version and digest, such as `v000002-3f9a0c51d2e4`; also the stem of its object."""
        return f"v{self.version:06d}-{self.digest[:12]}"

    @property
    def key(self) -> str:
        """Key below the dataset root."""
        return f"manifests/{self.name}.json"


class PointerMove(Contract):
    """One replacement of the pointer: which manifest became current, when and by what."""

    manifest: str
    version: int
    at: datetime
    action: Literal["publish", "rollback", "restore", "adopt"]


class PointerRecord(Contract):
    """Our part of `state.json`, under the key `dflash`."""

    format_version: Literal[1] = 1
    manifest: str
    manifest_sha256: Sha256 | Literal[""]  # empty while a saved dataset is adopted in place, never stored so
    version: int
    history: tuple[PointerMove, ...]


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8; NaN refused.

    Raises:
        ValueError: `value` holds NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> Sha256:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def fingerprint_of(parts: dict[str, Any]) -> Sha256:
    """Hash of named parts with a stable JSON form; equal parts give equal fingerprints.

    Raises:
        TypeError: a part has no JSON form.
    """
    return sha256_hex(canonical_json(parts))


def batch_fingerprint(shard_fingerprints: Iterable[str]) -> Sha256:
    """Fingerprint of a batch by those of its shards, in order."""
    return fingerprint_of({"shards": list(shard_fingerprints)})


def batch_from_receipts(source: str, receipts: Iterable[ShardReceipt]) -> Batch:
    """Describe a batch by the receipts of its shards, in shard order."""
    ordered = list(receipts)
    reasons: dict[str, int] = {}
    for receipt in ordered:
        for reason, count in receipt.reject_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Batch(
        source=source,
        fingerprint=batch_fingerprint(receipt.shard.fingerprint for receipt in ordered),
        inputs=tuple(item for receipt in ordered for item in receipt.inputs),
        num_shards=len(ordered),
        num_rows=sum(receipt.shard.num_rows for receipt in ordered),
        reject_reasons=dict(sorted(reasons.items())),
        rejects=tuple(receipt.rejects_sha256 for receipt in ordered if receipt.rejects_sha256),
    )
