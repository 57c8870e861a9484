"""Whether rows may lie in one dataset: equal schema, tokenizer, template and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.config import TokenizeOptions
from dflash.data.shards import SCHEMA_VERSION
from dflash.errors import IncompatibleError
from dflash.manifest import Manifest, TokenizerRecord


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides whether rows may lie in one dataset."""

    tokenizer: TokenizerRecord
    options: TokenizeOptions
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, manifest: Manifest) -> Recipe:
        """The recipe of a version."""
        return cls(manifest.tokenizer, manifest.options, manifest.schema_version)

    def facts(self) -> dict[str, Any]:
        """What has to be equal, by name."""
        tokenizer = self.tokenizer
        return {
            "schema_version": self.schema_version,
            "tokenizer.fingerprint": tokenizer.fingerprint,
            "tokenizer.template_fingerprint": tokenizer.template_fingerprint,
            "tokenizer.vocab_size": tokenizer.vocab_size,
            **{f"options.{name}": value for name, value in self.options.model_dump(mode="json").items()},
        }


def compare_recipes(first: Recipe, second: Recipe) -> list[tuple[str, str, str]]:
    """What differs: name, first value, second value."""
    facts = (first.facts(), second.facts())
    return [(name, str(facts[0][name]), str(facts[1][name])) for name in facts[0] if facts[0][name] != facts[1][name]]


def check_compatible(current: Manifest, candidate: Recipe) -> None:
    """Refuse rows that must not lie beside those of the current version.

    Raises:
        IncompatibleError: with a table of all that differs.
    """
    rows = compare_recipes(Recipe.of(current), candidate)
    if not rows:
        return
    table = [("field", "current", "new"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    raise IncompatibleError(
        f"The batch can't be merged into {current.name}: {len(rows)} things differ. Nothing was changed.\n"
        + "\n".join(line.rstrip() for line in lines)
        + f"\nTokenize it as the current version was (tokenizer {current.tokenizer.name}), or start another dataset."
    )
