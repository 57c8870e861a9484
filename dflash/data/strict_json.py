"""JSON without guesses: no duplicate keys, no NaN, no half surrogates, a limit to nesting.

The fast path is jiter, the one parser with a check for duplicate keys in native code (1.5x msgspec's time; msgspec and
a count of the keys in Python took 2.5x). Only what it refuses is parsed again, slowly, to say why.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import jiter

from dflash.data.records import Reason, shown
from dflash.errors import RecordError

MAX_DEPTH = 200  # jiter's own limit; containers inside containers


def parse_json(data: bytes) -> Any:
    """Parse one JSON value.

    A number such as 1e999 comes out as infinity here; `check_finite` finds it where it matters.

    Raises:
        RecordError: invalid_utf8, invalid_json, invalid_number, invalid_unicode, duplicate_key or too_deep.
    """
    try:
        return jiter.from_json(data, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True)
    except ValueError as error:
        raise _explain(data, str(error)) from None


def check_finite(value: dict[str, Any] | list[Any], where: str) -> None:
    """Refuse infinities at any depth.

    Raises:
        RecordError: invalid_number.
    """
    containers: list[Any] = [value]
    for container in containers:  # grows while it is walked
        for item in container.values() if container.__class__ is dict else container:
            kind = item.__class__
            if kind is dict or kind is list:
                containers.append(item)
            elif kind is float and not math.isfinite(item):
                raise _invalid_number(str(item), where)


def check_value(value: Any, where: str = "the record") -> None:
    """Hold a value that didn't come through `parse_json` to the same rules.

    Raises:
        RecordError: bad_field for what JSON can't hold, invalid_number, invalid_unicode or too_deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.keys())
                children.extend(item.values())
                if not all(isinstance(key, str) for key in item):
                    raise RecordError(Reason.BAD_FIELD, f"{where}: expected text as keys, found {shown(list(item))}.")
            elif isinstance(item, list):
                children.extend(item)
            else:
                _check_scalar(item, where)
        level = children
        if not level:
            return
    raise _too_deep(where)


def _check_scalar(item: Any, where: str) -> None:
    if isinstance(item, str):
        if not item.isascii():
            _check_unicode(item, where)
    elif isinstance(item, float):
        if not math.isfinite(item):
            raise _invalid_number(str(item), where)
    elif item is not None and not isinstance(item, int):
        raise RecordError(
            Reason.BAD_FIELD, f"{where}: expected only what JSON can hold, found a {type(item).__name__}."
        )


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            Reason.INVALID_UNICODE,
            f"{where}: expected whole characters, found the lone surrogate U+{ord(text[error.start]):04X} in "
            f"{text[max(0, error.start - 20) : error.start + 20]!r}. Its other half was lost where text was cut "
            "between two UTF-16 units; write the record again.",
        ) from None


def _explain(data: bytes, complaint: str) -> RecordError:
    """The reason why the fast parser refused the bytes."""
    try:
        check_value(_REFERENCE.decode(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        return RecordError(
            Reason.INVALID_UTF8,
            f"expected UTF-8, found byte 0x{data[error.start]:02x} at byte {error.start} of the line "
            f"({error.reason}). Write the file as UTF-8.",
        )
    except RecordError as error:
        return error
    except RecursionError:
        return _too_deep("the line")
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + 20]
        return RecordError(
            Reason.INVALID_JSON,
            f"expected one JSON value, found {found!r} at character {error.pos} of the line ({error.msg}). "
            "Write one JSON object a line.",
        )
    except ValueError as error:  # what Python says of integers beyond its digit limit
        return _invalid_number(str(error).split(";", maxsplit=1)[0], "the line")
    return RecordError(
        Reason.INVALID_JSON, f"expected one JSON value, found: {complaint}. Write one JSON object a line."
    )


def _invalid_number(found: str, where: str) -> RecordError:
    return RecordError(
        Reason.INVALID_NUMBER,
        f"{where}: expected finite numbers, found {found}. JSON has no NaN or Infinity: write null or leave it out.",
    )


def _too_deep(where: str) -> RecordError:
    return RecordError(
        Reason.TOO_DEEP, f"{where}: expected at most {MAX_DEPTH} nested levels, found more. Flatten the value."
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RecordError(
                Reason.DUPLICATE_KEY,
                f"expected each key once in an object, found {shown(key)} twice. Which value counts can't be known: "
                "write the record again.",
            )
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_number(name, "the line")


_REFERENCE = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
