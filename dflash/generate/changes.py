"""What differs between the request that made a record and the one that its id stands for now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dflash.data.records import shown
from dflash.generate.requests import Request


def name_changes(record: Mapping[str, Any], request: Request) -> list[str]:
    """What differs, each as a few words; empty where only the record's hash does."""
    then: dict[str, Any] = {
        "messages": record["messages"][:-1],
        "tools": record.get("tools") or [],
        "template arguments": record.get("chat_template_kwargs") or {},
    }
    now = {"messages": request.prompt.messages, "tools": list(request.tools), "template arguments": request.kwargs}
    long = [name for name, value in now.items() if _plain(value) != _plain(then[name])]
    return long + _short_changes(_settings_of(record), _settings_now(record, request))


def _short_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted(then.keys() | now.keys())
    return [
        f"{name} ({shown(then.get(name))} then, {shown(now.get(name))} now)"
        for name in names
        if then.get(name) != now.get(name)
    ]


def _settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": record.get("model")} | {
        f"sampling.{name}": value for name, value in (record.get("sampling") or {}).items()
    }


def _settings_now(record: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """As a record keeps them: the request's own seed, or the one of the try that gave the answer."""
    sampling = {name: value for name, value in request.sampling.model_dump().items() if value is not None}
    tries = (request, *(request.with_other_seed(number) for number in range(1, int(record.get("attempts") or 1))))
    seeds = [one.seed for one in tries]
    given = (record.get("sampling") or {}).get("seed")
    if request.seed is not None:
        sampling["seed"] = given if given in seeds else request.seed
    return {"model": request.model} | {f"sampling.{name}": value for name, value in sampling.items()}


def _plain(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
