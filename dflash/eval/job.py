"""Evaluate a drafter from a run model: load, decode, count, write `evaluation.json` beside the checkpoint."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash.data.dataset import DatasetRoot
from dflash.data.tokenizer import TargetTokenizer, load_tokenizer
from dflash.data.version_shards import VersionShards
from dflash.errors import DatasetError, GateError, StorageError, UsageError
from dflash.eval.acceptance import evaluate, refuse_training_prompts
from dflash.eval.config import EvaluateRun
from dflash.eval.prompts import Prompt, prompts_digest, read_prompts, thinking_counts
from dflash.eval.record import EvaluationRecord, Measured, PromptSet, write_evaluation
from dflash.eval.report import OVERALL
from dflash.eval.sampling import Sampling
from dflash.eval.speculate import Decoded, DecodeOptions, Speculator
from dflash.eval.subject import Subject, open_subject
from dflash.model.device import choose_device
from dflash.model.features import Target
from dflash.storage import S3Credentials
from dflash.train.environment import fingerprint

log = logging.getLogger(__name__)

OnPrompt = Callable[[Prompt, Decoded, TargetTokenizer], None]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """An evaluation and where it lies.

    Attributes:
        record: the content of `evaluation.json`.
        uri: of that file.
        min_tau: the limit of the run; None for none.
    """

    record: EvaluationRecord
    uri: str
    min_tau: float | None = None

    def summary(self) -> dict[str, Any]:
        """The numbers that a caller wants first, as plain values."""
        overall, drafter = self.record.report.groups[OVERALL], self.record.drafter
        return {
            "evaluation": self.uri,
            "checkpoint": drafter.uri,
            "step": drafter.step,
            "weights_sha256": drafter.weights_sha256,
            "tau": self.record.tau,
            "definition": self.record.report.definition,
            "num_prompts": overall.num_prompts,
            "num_identical": overall.num_identical,
            "tokens_per_s": overall.tokens_per_s,
            "plain_tokens_per_s": overall.plain_tokens_per_s,
        }

    def enforce(self) -> None:
        """Hold the run's limit.

        Raises:
            GateError: tau is below it.
        """
        tau = self.record.tau
        if self.min_tau is not None and tau < self.min_tau:
            raise GateError(
                f"Held-out tau is {tau:.3f}, the limit min_tau is {self.min_tau:g}: {self.record.drafter.uri} may not "
                f"replace anything. The numbers are in {self.uri}; train longer or on more data, or lower min_tau."
            )


def evaluate_run(
    run: EvaluateRun, credentials: S3Credentials | None, cache: Path, on_prompt: OnPrompt | None = None
) -> EvaluationResult:
    """Decode the prompts with drafter and target, and record what came out.

    Args:
        run: what to evaluate, on what, how.
        credentials: for S3.
        cache: folder of checked copies of what lies on S3.
        on_prompt: gets each decoded prompt.

    Raises:
        UsageError: there is no drafter or no prompt, a prompt was trained on, or doesn't fit the target's positions.
        ModelError: target and drafter don't fit, or can't be loaded.
    """
    subject = open_subject(run.checkpoint, credentials, cache)
    target = run.target or subject.target
    if target is None:
        raise UsageError(f"{subject.store.uri} doesn't name its target. Give `target`: a folder or a hub id.")
    tokenizer = load_tokenizer(run.tokenizer or target, trust_remote_code=run.trust_remote_code)
    prompts = read_prompts(run.prompts, tokenizer, run.decode.chat_template_kwargs, run.limit, credentials)
    checked = _refuse_leaks(run, subject, prompts, credentials, cache)
    speculator = load_speculator(run, subject, target)
    _require_room(prompts, run.decode.max_new_tokens, speculator.target, target)
    options = decode_options(run, speculator.target, tokenizer)

    def show(prompt: Prompt, decoded: Decoded) -> None:
        if on_prompt is not None:
            on_prompt(prompt, decoded, tokenizer)

    report = evaluate(speculator, prompts, options, compare=run.compare, on_prompt=show)
    record = EvaluationRecord(
        drafter=Measured(uri=subject.store.uri, step=subject.step, weights_sha256=subject.weights_sha256),
        target=target,
        prompts=PromptSet(
            uri=run.prompts,
            sha256=prompts_digest(prompts),
            num_prompts=len(prompts),
            thinking=thinking_counts(prompts),
            checked_against=checked,
        ),
        options=run,
        report=report,
        environment=fingerprint(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    return EvaluationResult(record, write_evaluation(subject.store, record), run.min_tau)


def load_speculator(run: EvaluateRun, subject: Subject, name: str) -> Speculator:
    """Load target and drafter onto the run's device.

    Raises:
        UsageError: CUDA is asked for and isn't there.
        ModelError: the drafter was made for another target.
    """
    device = choose_device(run.device)
    kind = {"cpu": "float32", "cuda": "bfloat16"}[device.type] if run.dtype == "auto" else run.dtype
    dtype: torch.dtype = getattr(torch, kind)
    layers = subject.config.target_layer_ids
    target = Target.load(name, layers, device, dtype, trust_remote_code=run.trust_remote_code)
    require_same_target(subject, target, name)
    return Speculator(target, subject.load(dtype).to(device))


def decode_options(run: EvaluateRun, target: Target, tokenizer: TargetTokenizer) -> DecodeOptions:
    """Limits and sampling; a sequence ends at any end id that the target, its generation settings or tokenizer name."""
    decode = run.decode
    sampling = Sampling(decode.temperature, decode.top_p, decode.seed)
    return DecodeOptions(decode.max_new_tokens, _end_ids(target, tokenizer), sampling)


def _end_ids(target: Target, tokenizer: TargetTokenizer) -> Collection[int]:
    found: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    generation = getattr(target.model, "generation_config", None)
    for value in (getattr(place, "eos_token_id", None) for place in (target.text_config, generation)):
        found |= set(value) if isinstance(value, list | tuple) else set() if value is None else {value}
    return frozenset(found)


def _require_room(prompts: list[Prompt], max_new_tokens: int, target: Target, name: str) -> None:
    """Refuse what a target was never trained to see: beyond its positions its answers, and so tau, mean nothing."""
    positions = getattr(target.text_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return
    room = positions - max_new_tokens
    long = [prompt for prompt in prompts if len(prompt.ids) > room]
    if long:
        named = ", ".join(f"{prompt.id!r} ({len(prompt.ids)} tokens)" for prompt in long[:5])
        raise UsageError(
            f"{len(long)} of {len(prompts)} prompts and {max_new_tokens} new tokens don't fit the {positions} "
            f"positions of {name}: {named}. Leave them out, or lower decode.max_new_tokens."
        )


def require_same_target(subject: Subject, target: Target, name: str) -> None:
    """Refuse a drafter of another target.

    Raises:
        UsageError: layers, hidden size or vocabulary differ.
    """
    config = subject.config
    expected = (config.num_target_layers, config.hidden_size, config.vocab_size)
    found = (target.num_layers, target.hidden_size, int(target.head_VH.shape[0]))
    if expected != found:
        raise UsageError(
            f"{subject.store.uri} was trained for a target of (layers, hidden size, vocabulary) {expected}, but {name} "
            f"has {found}. Give the target that it was trained for."
        )


def _refuse_leaks(
    run: EvaluateRun, subject: Subject, prompts: list[Prompt], credentials: S3Credentials | None, cache: Path
) -> str | None:
    """Look for the prompts in the training data; return which version was looked at, None where none could be."""
    data = subject.record.get("data") or {}
    named = run.dataset or data.get("dataset")
    if named is None:
        return None
    version = run.dataset_version if run.dataset else data.get("manifest")
    try:
        root = DatasetRoot.open(named, credentials, cache)
        manifest = root.manifest(version)
    except (DatasetError, StorageError) as error:
        if run.dataset is not None:
            raise
        log.warning("the prompts weren't looked for in the data of %s: %s", subject.store.uri, error)
        return None
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="leak-check-", dir=cache))
    try:
        refuse_training_prompts(prompts, VersionShards(root, manifest, folder, max_bytes=0))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"{root.uri} {manifest.name}"
