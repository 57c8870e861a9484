"""Export a drafter from a run model: gate, write, read back, measure again, describe; S3 gets `config.json` last."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dflash.data.tokenizer import load_tokenizer
from dflash.errors import GateError, ModelError, UsageError
from dflash.eval.acceptance import evaluate
from dflash.eval.config import EXPORT_CONFIG, DecodeConfig, EvaluateRun, ExportRun
from dflash.eval.job import decode_options, load_speculator
from dflash.eval.model_card import CARD, Remeasured, is_card_of, model_card
from dflash.eval.prompts import read_prompts
from dflash.eval.record import EvaluationRecord, read_evaluation
from dflash.eval.speculate import Speculator
from dflash.eval.subject import Subject, open_subject
from dflash.model.export import ExportOptions, TargetParts, export_drafter, load_drafter
from dflash.model.features import Target
from dflash.model.speculators_layout import Verifier
from dflash.storage import S3Credentials, Store, open_store
from dflash.storage.files import os_errors_as_storage_errors
from dflash.train.checkpoint_record import WEIGHTS
from dflash.train.newest import newest_record
from dflash.train.preflight import refuse_inside

_MAX_CARD_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class ExportResult:
    """An export.

    Attributes:
        output: where it lies.
        format: layout.
        step: optimiser steps of the checkpoint.
        files: their sizes in bytes, by name.
        tau: of the evaluation beside the checkpoint; None without one.
        remeasured: tau before and after, where target and prompts were given.
    """

    output: str
    format: str
    step: int
    files: dict[str, int]
    tau: float | None
    remeasured: Remeasured | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def export_run(run: ExportRun, credentials: S3Credentials | None, cache: Path) -> ExportResult:
    """Write a checkpoint in a layout that servers load.

    Args:
        run: what, where to, which layout.
        credentials: for S3.
        cache: folder of checked copies.

    Raises:
        GateError: nobody evaluated these weights, and that wasn't waived.
        ModelError: the output holds an export or anything else, or what was written reads back differently.
        UsageError: there is no checkpoint, a target is needed and none is named, or the output lies in the dataset.
    """
    subject = open_subject(run.checkpoint, credentials, cache)
    _require_exportable(subject)
    evaluation = read_evaluation(subject.store)
    if evaluation is None or evaluation.drafter.weights_sha256 != subject.weights_sha256:
        _require_waiver(run, subject, evaluation)
        evaluation = None
    if subject.dataset is not None:
        refuse_inside(run.output, subject.dataset, "dataset")
    output = open_store(run.output, credentials)
    leftovers = _leftovers(output)
    job = _Export(run, subject, evaluation, credentials)
    local = output.local_path(EXPORT_CONFIG)
    if local is not None:
        files = job.write(local.parent)
    else:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="export-", dir=cache) as folder:
            files = job.write(Path(folder) / "drafter")
            output.delete(leftovers)
            _upload(Path(folder) / "drafter", output)
    assert subject.step is not None
    tau = None if evaluation is None else evaluation.tau
    return ExportResult(output.uri, run.format, subject.step, files, tau, job.remeasured)


def is_exported(run: ExportRun, credentials: S3Credentials | None) -> bool:
    """Whether the output already holds this very export, whole; an export of something else is none.

    Raises:
        UsageError: there is no checkpoint.
    """
    output = open_store(run.output, credentials)
    if not {EXPORT_CONFIG, CARD} <= {info.key for info in output.list()}:
        return False
    _, record = newest_record(run.checkpoint, credentials)
    card = output.read(CARD, max_bytes=_MAX_CARD_BYTES).decode(errors="replace")
    return is_card_of(card, run, str(record["files"].get(WEIGHTS)))


@dataclass(slots=True)
class _Export:
    run: ExportRun
    subject: Subject
    evaluation: EvaluationRecord | None
    credentials: S3Credentials | None
    remeasured: Remeasured | None = None

    def write(self, folder: Path) -> dict[str, int]:
        """Write the export as a local folder; return its files."""
        drafter = self.subject.load()
        dtype: torch.dtype = getattr(torch, self.run.dtype)
        target = self._target_parts() if self.run.format == "speculators" else None
        with os_errors_as_storage_errors(str(folder)):
            if folder.is_dir():
                folder.rmdir()  # empty, as `export_run` saw; only a new folder can appear whole
        export_drafter(drafter, folder, ExportOptions(self.run.format, dtype, target, describe=self._describe))
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}

    def _describe(self, folder: Path) -> Mapping[str, str]:
        """Measure the written drafter where that was asked for, and write the card."""
        if self.run.prompts is not None:
            self.remeasured = self._remeasure(folder, self.run.prompts)
        return {CARD: model_card(self.run, self.subject, self.evaluation, self._target_name(), self.remeasured)}

    def _remeasure(self, folder: Path, prompts_uri: str) -> Remeasured:
        """Tau of the checkpoint and of the files that were written, on the same few prompts."""
        name = self._required_target()
        options = EvaluateRun(checkpoint=self.run.checkpoint, target=name, prompts=prompts_uri)
        if self.evaluation is not None:
            decode, tokenizer_name = self.evaluation.options.decode, self.evaluation.options.tokenizer
        else:
            decode, tokenizer_name = DecodeConfig(), None
        options = options.model_copy(update={"decode": decode, "trust_remote_code": self.run.trust_remote_code})
        tokenizer = load_tokenizer(tokenizer_name or name, trust_remote_code=self.run.trust_remote_code)
        prompts = read_prompts(
            prompts_uri, tokenizer, decode.chat_template_kwargs, self.run.num_prompts, self.credentials
        )
        before = load_speculator(options, self.subject, name)
        written = load_drafter(folder, dtype=next(before.drafter.parameters()).dtype).to(before.target.device)
        limits = decode_options(options, before.target, tokenizer)
        taus = [
            evaluate(speculator, prompts, limits, compare=False).tau
            for speculator in (before, Speculator(before.target, written))
        ]
        return Remeasured(len(prompts), *taus)

    def _target_parts(self) -> TargetParts:
        """Embedding, head and name of the target, which the speculators layout ships."""
        name = self._required_target()
        target = Target.load(name, self.subject.config.target_layer_ids, trust_remote_code=self.run.trust_remote_code)
        architectures = tuple(target.model.config.architectures or (type(target.model).__name__,))
        return TargetParts(
            Verifier(name_or_path=name, architectures=architectures), target.embedding_VH, target.head_VH
        )

    def _required_target(self) -> str:
        name = self._target_name()
        if name is None:
            raise UsageError("This export needs the target: give `target`, the folder or hub id it was trained for.")
        return name

    def _target_name(self) -> str | None:
        evaluated = None if self.evaluation is None else self.evaluation.target
        return self.run.target or evaluated or self.subject.target


def _require_exportable(subject: Subject) -> None:
    if not subject.is_checkpoint:
        raise UsageError(f"{subject.store.uri} is an export already. Give a checkpoint or a run folder.")


def _require_waiver(run: ExportRun, subject: Subject, evaluation: EvaluationRecord | None) -> None:
    if run.without_evaluation:
        return
    found = (
        "has no evaluation"
        if evaluation is None
        else f"has an evaluation of other weights ({evaluation.drafter.weights_sha256[:12]} at step "
        f"{evaluation.drafter.step}, not {subject.weights_sha256[:12]} at step {subject.step})"
    )
    raise GateError(
        f"{subject.store.uri} {found}, so nobody knows whether it drafts anything. Run `dflash evaluate --checkpoint "
        f"{subject.store.uri}` first, or say --without-evaluation."
    )


def _leftovers(output: Store) -> list[str]:
    """What an export to S3 that was cut has left: files of one, without the `config.json` that goes last.

    Raises:
        ModelError: the output holds an export, or something that no export wrote.
    """
    local = output.local_path(EXPORT_CONFIG)
    if local is None:
        keys = [info.key for info in output.list()]
        found = 0 if set(keys) <= {CARD, WEIGHTS} else len(keys)
    else:  # a folder appears whole, so nothing in it is left over
        keys, found = [], _held(local.parent)
    if found:
        raise ModelError(f"{output.uri} holds {found} objects already: choose a new place or empty it.")
    return keys


def _held(folder: Path) -> int:
    """How many files and folders a new folder's place holds, hidden ones too."""
    if folder.is_symlink():
        raise ModelError(f"{folder} is a link, and an export takes its place as a whole: name where it leads.")
    with os_errors_as_storage_errors(str(folder)):
        return len(list(folder.iterdir())) if folder.exists() else 0


def _upload(folder: Path, output: Store) -> None:
    """Upload all files; `config.json` goes last, so that no reader finds half an export."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == EXPORT_CONFIG, name))
    for name in names:
        output.put_if_absent(name, folder / name)
