"""Checks before anything is loaded: data, target and drafter fit each other, and the device; needs no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.data.dataset import DatasetRoot
from dflash.errors import DatasetError, IncompatibleError, ModelError, UsageError
from dflash.manifest import Manifest
from dflash.model.layout import DrafterConfig
from dflash.storage import parse_uri
from dflash.train.config import TrainConfig
from dflash.train.run import TrainRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose parts fit each other.

    Attributes:
        config: of the training, with what follows from data and target filled in.
        manifest: the version to train on.
        text_config: the target's text configuration.
        network: the drafter.
    """

    config: TrainConfig
    manifest: Manifest
    text_config: Any
    network: DrafterConfig


def prepare(run: TrainRun, root: DatasetRoot) -> Prepared:
    """Resolve the version and check all that can be checked without weights.

    Raises:
        DatasetError: there is no such version, or it has no rows or no loss tokens.
        IncompatibleError: the dataset was tokenized for another vocabulary.
        ModelError: the target's configuration can't be read, or the drafter doesn't fit it.
        UsageError: a setting is missing or too large for the target, or the output lies in the dataset or the target.
    """
    refuse_inside(run.output, run.dataset, "dataset")
    refuse_inside(run.output, run.target, "target")
    manifest = root.manifest(run.version)
    if not manifest.counts.num_rows:
        raise DatasetError(f"{manifest.name} of {run.dataset} has no rows, so there is nothing to train on.")
    if not manifest.counts.num_loss_tokens:
        raise DatasetError(
            f"{manifest.name} of {run.dataset} has {manifest.counts.num_rows} rows and no token to learn: all loss "
            "masks are empty. Look at `dflash inspect`, and tokenize the completions again with the target's template."
        )
    text_config = read_text_config(run.target, trust_remote_code=run.trust_remote_code)
    _check_vocabulary(run, manifest, text_config)
    _check_lengths(run, manifest, text_config)
    config = _with_mask_id(run.train, manifest, text_config)
    return Prepared(config, manifest, text_config, drafter_config(config, text_config))


def refuse_inside(output: str, holder: str, what: str) -> None:
    """Refuse to write into a folder whose content others take as a whole: a dataset root, a target.

    Args:
        output: URI that is about to be written below.
        holder: URI, or the hub id of a target, which holds nothing here.
        what: `dataset` or `target`, for the message.

    Raises:
        UsageError: the output is that place, or lies inside it.
    """
    below, above = _place(output), _place(holder)
    if below[: len(above)] == above:
        raise UsageError(
            f"The output {output} lies inside the {what} {holder}, which readers take as a whole and clean up: choose "
            "an output outside it."
        )


def _place(uri: str) -> tuple[str, ...]:
    """The parts of a place, links followed."""
    location = parse_uri(uri)
    path = Path(location.path).resolve() if location.scheme == "file" else Path(location.path)
    return (location.scheme, location.bucket, *path.parts)


def read_text_config(target: str, *, trust_remote_code: bool = False) -> Any:
    """Read a target's text configuration.

    Raises:
        ModelError: it isn't there or can't be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:  # each architecture checks its configuration in its own way
        raise ModelError(
            f"The configuration of the target {target} can't be read: {error}. Expected a folder with config.json and "
            "weights, or a hub id that can be had here."
        ) from error


def drafter_config(config: TrainConfig, text_config: object) -> DrafterConfig:
    """Derive the drafter's network from the run's choices and the target's configuration.

    Raises:
        UsageError: the mask id isn't chosen; which id is free only the tokenizer knows.
        ModelError: a choice doesn't fit the target.
    """
    if config.drafter.mask_token_id is None:
        raise UsageError(
            "drafter.mask_token_id is missing. Give an id that the target never writes: the tokenizer's mask token, "
            "else the first embedding row without a token, else the padding id."
        )
    return DrafterConfig.for_target(text_config, **config.drafter.chosen())


def _check_vocabulary(run: TrainRun, manifest: Manifest, text_config: Any) -> None:
    made, rows = manifest.tokenizer.vocab_size, int(text_config.vocab_size)
    if made > rows:
        raise IncompatibleError(
            f"{manifest.name} of {run.dataset} was tokenized by {manifest.tokenizer.name} with ids up to {made - 1}, "
            f"but the target {run.target} has an embedding of {rows} rows. Train for the target that wrote the data, "
            "or tokenize the completions with this target's tokenizer."
        )


def _check_lengths(run: TrainRun, manifest: Manifest, text_config: Any) -> None:
    longest, positions = manifest.options.max_seq_len, int(text_config.max_position_embeddings)
    budget = run.train.pack_tokens
    if min(longest, budget) > positions:
        raise UsageError(
            f"Rows of up to {min(longest, budget)} tokens (the dataset allows {longest}, train.pack_tokens {budget}) "
            f"don't fit the target's {positions} positions. Set train.pack_tokens to at most {positions}."
        )
    if budget < longest:
        log.warning(
            "train.pack_tokens %d is less than the dataset's max_seq_len %d: longer rows are cut there", budget, longest
        )


def _with_mask_id(config: TrainConfig, manifest: Manifest, text_config: Any) -> TrainConfig:
    """Take the first embedding row without a token as mask id where none is chosen."""
    first_free = manifest.tokenizer.vocab_size
    if config.drafter.mask_token_id is not None or first_free >= int(text_config.vocab_size):
        return config
    drafter = config.drafter.model_copy(update={"mask_token_id": first_free})
    return config.model_copy(update={"drafter": drafter})
