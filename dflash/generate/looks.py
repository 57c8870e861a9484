"""What is worth counting about one record: repetition, script, refusal, a trace without an answer."""

from __future__ import annotations

import bisect
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypedDict

import msgspec

from dflash.data.completions import FINISH_REASONS, normalise_record
from dflash.data.messages import CLOSE_TAG
from dflash.data.scripts import dominant_script

COMPRESSED_CHARACTERS: Final = 32_768  # of the end, where loops are
MIN_LOOP_CHARACTERS: Final = 300  # shorter texts compress by chance
LOOP_RATIO: Final = 8.0  # prose compresses about 2 to 3 times, code and tables up to 5
_REFUSAL: Final = re.compile(
    r"(?i)\s*(i['\u2019]?m sorry|i am sorry|sorry,|i apologi[sz]e|as an ai|i can(['\u2019]?t|not)\b"
    r"|i['\u2019]?m (not able|unable)|i am (not able|unable)|i won['\u2019]?t|unfortunately, i"
    r"|(很|非常)?抱歉|对不起|我(无法|不能))"
)
REFUSAL_CHARACTERS: Final = 200
MAX_SAMPLES: Final = 5
MAX_EXAMPLES: Final = 10


class Look(TypedDict):
    """The line of a part's index for a record; what another program wrote is held to it."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    request: Annotated[str, msgspec.Meta(min_length=1)]
    source: str | None
    finish: str
    output_tokens: int | None
    prompt_tokens: int | None
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1e300)]
    script: str
    marks: list[str]


def look_at(record: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a part's index for a record that was accepted.

    Returns:
        `id`, `request` (hash), `source`, `finish`, token counts, `ratio` (characters compressed to one), `script`, and
        `marks`: loop, refusal, think_only, thinking_truncated, no_ids.
    """
    message = record["messages"][-1]
    if CLOSE_TAG in _text(message.get("content")):  # a server without a reasoning parser gives trace and answer as one
        message = normalise_record(record, is_parsed=True).messages[-1]
    content, trace = _text(message.get("content")), _text(message.get("reasoning_content"))
    text = f"{trace}\n{content}" if trace else content
    ratio = compression_ratio(text)
    has_answer = bool(content.strip()) or bool(message.get("tool_calls"))
    marks = {
        "loop": ratio >= LOOP_RATIO and len(text) >= MIN_LOOP_CHARACTERS,
        "refusal": bool(_REFUSAL.match(content[:REFUSAL_CHARACTERS])),
        "think_only": not has_answer,
        "thinking_truncated": bool(record.get("thinking_truncated")),
        "no_ids": not record.get("output_token_ids"),
    }
    finish = str(record.get("finish_reason") or "")
    return {
        "id": record["id"],
        "request": record.get("request_hash", ""),
        "source": record.get("source", ""),
        "finish": FINISH_REASONS.get(finish.casefold(), finish),
        "output_tokens": record.get("output_tokens"),
        "prompt_tokens": record.get("prompt_tokens"),
        "ratio": round(ratio, 2),
        "script": dominant_script(content or trace),
        "marks": [name for name, is_set in marks.items() if is_set],
    }


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes the end of a text; a loop makes it large. 1 for an empty text."""
    data = text[-COMPRESSED_CHARACTERS:].encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, 1)) if data else 1.0


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part.get("text", "") for part in value if isinstance(part, dict))
    return ""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a record lies, ordered by a key."""

    key: float
    id: str
    part: str


@dataclass(slots=True)
class BatchCounts:
    """Sums over the records of a batch, and which of them to show; its size doesn't grow with the batch.

    Attributes:
        worst: records that compress best, the best last.
        drawn: a draw that depends on the ids alone.
    """

    num_records: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    ratios: Counter[int] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    worst: list[Place] = field(default_factory=list)
    drawn: list[Place] = field(default_factory=list)

    def add(self, look: Mapping[str, Any], part: str) -> None:
        """Count the index line of one record."""
        self.num_records += 1
        self.output_tokens += look["output_tokens"] or 0
        self.prompt_tokens += look["prompt_tokens"] or 0
        self.finishes[look["finish"] or "unknown"] += 1
        self.scripts[look["script"]] += 1
        self.sources[look["source"] or ""] += 1
        self.ratios[int(look["ratio"])] += 1
        for mark in look["marks"]:
            self.marks[mark] += 1
            examples = self.examples.setdefault(mark, [])
            if len(examples) < MAX_EXAMPLES:
                examples.append(look["id"])
        draw = int.from_bytes(hashlib.blake2b(look["id"].encode(), digest_size=6).digest())
        _keep_largest(self.worst, Place(look["ratio"], look["id"], part))
        _keep_largest(self.drawn, Place(draw, look["id"], part))


def _keep_largest(places: list[Place], place: Place) -> None:
    if len(places) == MAX_SAMPLES and place <= places[0]:
        return
    bisect.insort(places, place)
    del places[:-MAX_SAMPLES]
