"""`evaluation.json`: what was measured on which weights; lies beside the checkpoint and opens the way to an export."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash.errors import IntegrityError, ObjectNotFoundError
from dflash.eval.config import EvaluateRun
from dflash.eval.report import OVERALL, AcceptanceReport
from dflash.storage import Store
from dflash.validation import problems_of

EVALUATION: Final = "evaluation.json"
FORMAT_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 20


class _Stored(BaseModel):
    """Base of what is stored: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Stored):
    """Whose weights were measured."""

    uri: str = Field(description="Where the checkpoint or export lay.")
    step: int | None = Field(description="Optimiser steps; none for an export.")
    weights_sha256: str = Field(description="SHA-256 (hex) of model.safetensors: says whether this is that drafter.")


class PromptSet(_Stored):
    """What it was measured on."""

    uri: str = Field(description="Where the prompts lay.")
    sha256: str = Field(description="SHA-256 (hex) over ids, sources and tokens of the prompts that were used.")
    num_prompts: int = Field(ge=1, description="Prompts.")
    thinking: dict[str, int] = Field(description="Prompts with thinking `on`, `off` or left to the template.")
    checked_against: str | None = Field(description="Dataset version that holds none of them; none: nobody looked.")


class EvaluationRecord(_Stored):
    """One evaluation."""

    format_version: Literal[1] = 1
    drafter: Measured
    target: str = Field(min_length=1, description="Folder or hub id of the target.")
    prompts: PromptSet
    options: EvaluateRun = Field(description="All parameters of the run.")
    report: AcceptanceReport = Field(description="tau with its definition, by source and overall; divergences.")
    environment: dict[str, str] = Field(description="Versions, CUDA, driver, devices.")
    created_at: datetime

    @model_validator(mode="after")
    def _has_tau(self) -> Self:
        """Refuse an evaluation that says nothing, or something that can't be measured: a gate reads it."""
        groups = self.report.groups
        if OVERALL not in groups:
            raise ValueError(f"report.groups lacks {OVERALL}, found {sorted(groups)}")
        if wrong := [f"{name} {group.tau}" for name, group in groups.items() if not 1 <= group.tau < math.inf]:
            raise ValueError(f"tau is a finite number of at least 1, found {', '.join(wrong)}")
        return self

    @property
    def tau(self) -> float:
        """Overall tau."""
        return self.report.tau

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read the file.

        Raises:
            IntegrityError: it is damaged or of another version.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problems = problems_of(error, "the file")
            raise IntegrityError(
                f"{where} is no evaluation of version {FORMAT_VERSION}: {problems}. Remove it, then run `dflash "
                "evaluate` again."
            ) from error


def read_evaluation(store: Store) -> EvaluationRecord | None:
    """The evaluation beside a checkpoint; None where there is none.

    Raises:
        IntegrityError: it is damaged.
    """
    try:
        data = store.read(EVALUATION, max_bytes=_MAX_BYTES)
    except ObjectNotFoundError:
        return None
    return EvaluationRecord.from_bytes(data, f"{store.uri}/{EVALUATION}")


def write_evaluation(store: Store, record: EvaluationRecord) -> str:
    """Put an evaluation beside its checkpoint, in place of an older one; return its URI.

    Raises:
        PreconditionError: somebody else put one there at the same time.
    """
    try:
        etag = store.head(EVALUATION).etag
    except ObjectNotFoundError:
        etag = None
    store.replace(EVALUATION, record.to_bytes(), if_match=etag)
    return f"{store.uri}/{EVALUATION}"
