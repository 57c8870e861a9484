"""Write a drafter in the layouts that servers load, and load one back without believing it.

An export appears whole or not at all: it is written beside its destination, read back, compared tensor by tensor and
field by field, and only then renamed.

Legend for shapes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import ModelError
from dflash.model.attention import Backend
from dflash.model.drafter import Drafter
from dflash.model.layout import DrafterConfig, ExportFormat, tensor_shapes
from dflash.model.speculators_layout import Verifier, from_speculators, to_speculators
from dflash.storage.files import sync_path

Describe = Callable[[Path], Mapping[str, str]]

# What the speculators layout ships beside the drafter's own tensors.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What the speculators layout takes from the target.

    Attributes:
        verifier: how its readers find the target.
        embedding_VH: input embedding.
        head_VH: output head.
    """

    verifier: Verifier
    embedding_VH: Tensor
    head_VH: Tensor


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to write an export.

    Attributes:
        layout: SGLang and vLLM load the same official layout.
        dtype: of the weights in the file.
        target: required by the speculators layout, unused otherwise.
        documents: further text files of the folder by name, such as README.md.
        describe: gets the folder once it is written and checked, before it has its name, and gives more documents.
    """

    layout: ExportFormat
    dtype: torch.dtype = torch.bfloat16
    target: TargetParts | None = None
    documents: Mapping[str, str] = field(default_factory=dict)
    describe: Describe | None = None


def export_drafter(drafter: Drafter, folder: Path, options: ExportOptions) -> None:
    """Write a drafter into a new folder.

    Args:
        drafter: the trained network.
        folder: must not exist yet.
        options: layout, dtype, what else goes along.

    Raises:
        ModelError: the folder exists, a weight isn't finite, or the files read back differ from what was written.
    """
    if os.path.lexists(folder):
        raise ModelError(f"the export folder {folder} exists already: choose a new one or remove it")
    tensors = {name: _rounded(name, tensor, options.dtype) for name, tensor in drafter.state_dict().items()}
    check_tensors(tensors, drafter.config, "the drafter")
    config = _config_file(drafter.config, options)
    if options.layout == "speculators":
        tensors |= _target_tensors(drafter.config, options)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        _write_texts(partial, {"config.json": json.dumps(config, indent=2) + "\n", **_named(options.documents)})
        _compare(partial, tensors, config, drafter.config)
        if options.describe is not None:
            _write_texts(partial, _named(options.describe(partial)))
        _flush(partial)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise ModelError(
            f"the export to {folder} failed, and nothing of it is there: {error}. Free the disk, or choose another "
            "place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_drafter(folder: Path, attention: Backend = "sdpa", dtype: torch.dtype = torch.float32) -> Drafter:
    """Load a drafter from a folder in the official or the speculators layout.

    Args:
        folder: with config.json and one or more .safetensors files.
        attention: backend of the drafter.
        dtype: of its parameters; fp32 to train on, bf16 to decode on a GPU.

    Raises:
        ModelError: a file is missing or damaged, or tensors are missing, unexpected or of another shape.
    """
    config = read_config(folder)
    tensors = {name: tensor for name, tensor in _read_tensors(folder).items() if name not in TARGET_TENSORS}
    return drafter_of(tensors, config, str(folder), attention, dtype)


def drafter_of(
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    where: str,
    attention: Backend = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Build a drafter from its tensors, without drawing weights first.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape; `where` says whose.
    """
    check_tensors(tensors, config, where)
    with torch.device("meta"):
        drafter = Drafter(config, attention)
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=True, assign=True)
    return drafter


def read_config(folder: Path) -> DrafterConfig:
    """The configuration of an exported drafter, in either layout.

    Raises:
        ModelError: it is missing, damaged or describes another network.
    """
    config = _read_json(folder / "config.json")
    try:
        return from_speculators(config) if "speculators_model_type" in config else DrafterConfig.from_official(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _config_file(config: DrafterConfig, options: ExportOptions) -> dict[str, Any]:
    dtype = str(options.dtype).removeprefix("torch.")
    if options.layout != "speculators":
        return config.to_official(dtype)
    if options.target is None:
        raise ModelError("the speculators layout ships the target's embedding and head: pass the target")
    return to_speculators(config, options.target.verifier, dtype)


def _target_tensors(config: DrafterConfig, options: ExportOptions) -> dict[str, Tensor]:
    """Embedding and head, as two separate tensors even where they are tied."""
    assert options.target is not None
    found = dict(zip(TARGET_TENSORS, (options.target.embedding_VH, options.target.head_VH), strict=True))
    expected = (config.vocab_size, config.hidden_size)
    for name, tensor in found.items():
        if tuple(tensor.shape) != expected:
            raise ModelError(f"the target's {name}: expected shape {expected}, found {tuple(tensor.shape)}")
    return {name: _rounded(name, tensor, options.dtype).clone() for name, tensor in found.items()}


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as the file will hold it."""
    rounded = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not bool(rounded.isfinite().all()):
        raise ModelError(f"{name} has values that aren't finite in {dtype}: export an earlier checkpoint")
    return rounded


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Refuse tensors that aren't exactly those of the configuration.

    Raises:
        ModelError: some are missing, unexpected or of another shape; `where` says whose.
    """
    expected = tensor_shapes(config)
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    misshaped = [
        f"{name}: expected {shape}, found {tuple(tensors[name].shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if missing or unexpected or misshaped:
        raise ModelError(
            f"{where} doesn't hold the {len(expected)} tensors of its configuration: {len(missing)} missing "
            f"{missing[:5]}, {len(unexpected)} unexpected {unexpected[:5]}, {len(misshaped)} of another shape "
            f"{misshaped[:5]}"
        )


def _named(documents: Mapping[str, str]) -> Mapping[str, str]:
    """The documents, if each has a plain name of its own."""
    for name in documents:
        if Path(name).name != name or name in {"config.json", "model.safetensors"}:
            raise ModelError(f"a document of an export needs a plain name of its own, found {name!r}")
    return documents


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _flush(folder: Path) -> None:
    """Make all files durable before the folder gets its name."""
    for path in (*folder.iterdir(), folder):
        sync_path(path)


def _compare(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], drafter: DrafterConfig) -> None:
    """Read the files back and compare them with what was meant."""
    found = _read_tensors(folder)
    different = [name for name, tensor in tensors.items() if name not in found or not torch.equal(found[name], tensor)]
    if different or found.keys() != tensors.keys():
        raise ModelError(f"{folder}: tensors read back differ from those written: {different or sorted(found)}")
    if _read_json(folder / "config.json") != json.loads(json.dumps(config)) or read_config(folder) != drafter:
        raise ModelError(f"{folder}/config.json read back describes another drafter than the one written")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            part = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or can't be read: {error}") from error
        if doubled := sorted(part.keys() & tensors.keys()):
            raise ModelError(f"{path} repeats tensors of another file: {doubled[:5]}")
        tensors |= part
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
