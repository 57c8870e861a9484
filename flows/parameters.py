"""One way from the shell to a run model: a TOML file, single values by `--set`, the commonest by name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dflash.config import RunModel
from dflash.errors import UsageError

Model = TypeVar("Model", bound=RunModel)


def load_parameters(
    model: type[Model], config: Path | None, settings: Sequence[str], named: Mapping[str, Any]
) -> Model:
    """Merge, in rising order of precedence: the TOML file, `--set key=value`, options given by name.

    Args:
        model: the run model.
        config: TOML file with the model's fields, nested ones as tables.
        settings: `key=value`; dots reach into nested models, values are JSON or else plain text.
        named: options by field name; None means not given.

    Raises:
        UsageError: unreadable file, malformed setting, unknown or invalid field; names each.
    """
    values = _read_toml(config) if config is not None else {}
    for setting in settings:
        _assign(values, setting)
    values |= {name: value for name, value in named.items() if value is not None}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        known = ", ".join(model.model_fields)
        raise UsageError(
            f"These parameters can't be used:\n{chr(10).join(lines)}\nKnown at the top level: {known}."
        ) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, numbers of 5,000 digits, nesting without end
        raise UsageError(f"--config {path} is not TOML: {error}.") from error


def _assign(values: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {setting}: expected key=value, such as options.max_seq_len=4096.")
    *parents, leaf = key.split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise UsageError(f"--set {setting}: {parent} is a value, not a group of fields.")
    try:
        place[leaf] = json.loads(text)
    except (ValueError, RecursionError):
        place[leaf] = text
