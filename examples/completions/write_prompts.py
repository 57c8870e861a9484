"""Composes the example prompts from the hand-written lists in `material/`.

Every list keeps its first entries for the held-out prompts, so that no topic, exercise or
conversation that the drafter is evaluated on was seen while it was trained. The composition is
deterministic: the same material gives the same two files, byte for byte.

    python examples/completions/write_prompts.py
"""

import itertools
import json
import random
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MATERIAL = HERE / "material"
CATEGORIES = (
    "maths",
    "code",
    "explain",
    "lists",
    "writing",
    "chat",
    "rewrite",
    "instructions",
)
SEED = 20_250_601
SYSTEM_SHARE = 0.2
HELDOUT_SHARE = 0.1
NUMBER = re.compile(r"\{(\w):(\d+)-(\d+)\}")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What every category draws from: names for the word problems, system prompts."""

    names: list[str]
    systems: list[str]


def main() -> None:
    """Writes `prompts.jsonl` and `heldout_prompts.jsonl` beside this script."""
    frame = Frame(**tomllib.loads((MATERIAL / "frame.toml").read_text(encoding="utf-8")))
    training: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    for category in CATEGORIES:
        rng = random.Random(f"{SEED}-{category}")
        trained, held = compose(category, frame, rng)
        training += number(category, trained, frame)
        heldout += number(f"heldout-{category}", held, frame)
    # Mixed once here, so that each file of completions holds every category.
    random.Random(SEED).shuffle(training)
    write(HERE / "prompts.jsonl", training)
    write(HERE / "heldout_prompts.jsonl", heldout)


def compose(category: str, frame: Frame, rng: random.Random) -> tuple[list[Messages], list[Messages]]:
    """Returns the training and the held-out conversations of one category."""
    training: list[Messages] = []
    heldout: list[Messages] = []
    groups = tomllib.loads((MATERIAL / f"{category}.toml").read_text(encoding="utf-8"))
    for kind, group in ((kind, group) for kind, found in groups.items() for group in found):
        topics = group["subjects"] if kind == "single" else group["talks"]
        num_reserved = max(1, round(len(topics) * HELDOUT_SHARE))
        for chosen, count, collected in (
            (topics[:num_reserved], group["heldout"], heldout),
            (topics[num_reserved:], group["count"], training),
        ):
            candidates = singles(group, chosen) if kind == "single" else dialogues(group, chosen)
            collected.extend(draw(candidates, count, frame, rng))
    return training, heldout


def singles(group: dict[str, Any], subjects: Iterable[str]) -> list[Messages]:
    """Every frame of the group around every subject, as conversations of one turn."""
    return [
        [{"role": "user", "content": frame.replace("{x}", subject)}]
        for frame, subject in itertools.product(group["frames"], subjects)
    ]


def dialogues(group: dict[str, Any], talks: Iterable[list[str]]) -> list[Messages]:
    """Every follow-up question of every talk, as conversations of two turns."""
    return [
        [
            {"role": "user", "content": opening},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": followup},
        ]
        for opening, reply, *own in talks
        for followup in [*own, *group["followups"]]
    ]


def draw(candidates: list[Messages], count: int, frame: Frame, rng: random.Random) -> list[Messages]:
    """Returns `count` different conversations; a candidate is used again only with new numbers.

    Raises:
        ValueError: The material cannot give that many different conversations.
    """
    drawn: dict[str, Messages] = {}
    for _ in range(10):
        rng.shuffle(candidates)
        for candidate in candidates:
            if len(drawn) == count:
                return list(drawn.values())
            messages = filled(candidate, frame, rng)
            # The prompt alone decides: two system prompts don't make two prompts.
            drawn.setdefault(json.dumps(messages), messages)
    if len(drawn) < count:
        message = f"only {len(drawn)} different prompts for {count}; add to the material"
        raise ValueError(message)
    return list(drawn.values())


def filled(messages: Messages, frame: Frame, rng: random.Random) -> Messages:
    """Puts numbers and two different names into a conversation's placeholders."""
    name, other = rng.sample(frame.names, 2)

    def fill(text: str) -> str:
        text = NUMBER.sub(lambda match: str(rng.randint(int(match[2]), int(match[3]))), text)
        return text.replace("{name}", name).replace("{other}", other)

    return [{"role": m["role"], "content": fill(m["content"])} for m in messages]


def number(prefix: str, conversations: list[Messages], frame: Frame) -> list[dict[str, Any]]:
    """Gives each conversation its id and source, and some of them a system prompt."""
    rng = random.Random(f"{SEED}-{prefix}-systems")
    records = []
    for index, messages in enumerate(conversations):
        opening: Messages = []
        if rng.random() < SYSTEM_SHARE:
            opening = [{"role": "system", "content": rng.choice(frame.systems)}]
        records.append(
            {
                "id": f"{prefix}-{index:04d}",
                "messages": opening + messages,
                "source": prefix.removeprefix("heldout-"),
            }
        )
    return records


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes one JSON object a line."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
