"""Realistic batches for benchmarks: varied real text, thinking traces, some non-Latin, no repeated paragraphs.

Sentences come from the completions of the small target in `examples/` and, where it lies beside the checkout, from the
shared real inputs. Each paragraph is a fresh draw of sentences, so that no encoder's cache sees the same one twice.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"
NON_LATIN = (
    "首先我们把问题分成两个部分,然后分别计算每一部分的结果。",
    "因此,最后的答案应该是这两个数的和,再减去重复的部分。",
    "Сначала найдём общее количество, затем разделим его на три равные части.",
    "इस प्रश्न को हल करने के लिए पहले हम कुल संख्या निकालते हैं।",
    "まず条件を整理し、次に式を立てて順番に計算します。",
    "먼저 문제의 조건을 정리하고 차례대로 계산해 봅시다.",
)


def sentences() -> list[str]:
    """Sentences of real text, without repetitions, in a fixed order."""
    texts = [_text(record) for path in _sources() for record in _records(path)]
    found = dict.fromkeys(
        sentence.strip() for text in texts for sentence in re.split(r"(?<=[.!?])\s+|\n+", text) if len(sentence) > 20
    )
    return list(found)


def make_records(num_records: int, tokens_per_record: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Completions of about `tokens_per_record` tokens (four characters each), 8 % of them not in Latin script."""
    pool = sentences()
    for number in range(num_records):
        rng = random.Random(seed * 1_000_003 + number)
        foreign = rng.random() < 0.08
        target = max(40, int(rng.lognormvariate(0, 0.5) * tokens_per_record * 3.6))
        trace = _paragraphs(rng, pool, target * 3 // 4, foreign)
        answer = _paragraphs(rng, pool, target // 4, foreign)
        yield {
            "id": f"sample-{seed}-{number:07d}",
            "messages": [
                {"role": "user", "content": _paragraphs(rng, pool, 200, foreign)},
                {"role": "assistant", "reasoning_content": trace, "content": answer},
            ],
            "finish_reason": "stop",
            "source": rng.choice(("maths", "code", "chat", "agent")),
            "chat_template_kwargs": {"enable_thinking": True},
        }


def write_batch(folder: Path, num_files: int, records_per_file: int, tokens_per_record: int, seed: int = 0) -> int:
    """Write a batch of JSON Lines files; return its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    records = make_records(num_files * records_per_file, tokens_per_record, seed)
    total = 0
    for number in range(num_files):
        lines = [json.dumps(next(records), ensure_ascii=False) for _ in range(records_per_file)]
        data = ("\n".join(lines) + "\n").encode()
        (folder / f"part-{number:05d}.jsonl").write_bytes(data)
        total += len(data)
    return total


def _paragraphs(rng: random.Random, pool: list[str], num_characters: int, foreign: bool) -> str:
    parts: list[str] = []
    size = 0
    while size < num_characters:
        sentence = rng.choice(NON_LATIN) if foreign and rng.random() < 0.8 else rng.choice(pool)
        number = f" {rng.randrange(10_000)}" if rng.random() < 0.3 else ""
        parts.append(sentence + number + ("\n\n" if rng.random() < 0.1 else " "))
        size += len(parts[-1]) * (3 if foreign else 1)
    return "".join(parts).strip()


def _sources() -> list[Path]:
    paths = sorted((REPOSITORY / "examples" / "completions").glob("part-*.jsonl"))
    for name in ("reasoning_messages/*.jsonl", "gsm8k/*.jsonl"):
        paths += sorted(SHARED.glob(name))
    return paths


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _text(record: dict[str, Any]) -> str:
    if "messages" not in record:
        return f"{record.get('question', '')}\n{record.get('answer', '')}"
    fields = [message.get(name) for message in record["messages"] for name in ("reasoning_content", "content")]
    return "\n".join(text for text in fields if isinstance(text, str))
