"""Names of flow runs: what a flow does, and the last part of the place that it does it to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from prefect.runtime import flow_run as runtime


def last_part(uri: str) -> str:
    """Return the last part of a place, such as `train` of `s3://bucket/datasets/train/`."""
    return PurePosixPath(uri.rstrip("/")).name


def config_value(*path: str) -> Any:
    """Look up a field of the running flow's `config`, which is a run model or, from the API, a dict."""
    value = runtime.parameters["config"]
    for name in path:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def named_after(verb: str, *path: str) -> Callable[[], str]:
    """Make the name of a flow's runs: a verb and the last part of the place at a field of `config`."""
    return lambda: f"{verb}-{last_part(config_value(*path))}"
