"""What pydantic found wrong with a document, for messages."""

from __future__ import annotations

from pydantic import ValidationError

_SHOWN = 5


def problems_of(error: ValidationError, whole: str = "") -> str:
    """The first five problems, each with its place; `whole` stands for the document itself."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in error.errors()[:_SHOWN])
