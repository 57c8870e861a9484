"""The small target's greedy answers to GSM8K questions: written once, kept in .dflash/bench, more when asked for.

The order is a fixed shuffle of the questions, so a longer file begins with the lines of a shorter one. About a second
and a half of one core an answer.

    python benchmarks/answers.py 1150
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from typing import Any  # noqa: E402

from embedded.smollm2 import ensure_smollm2  # noqa: E402

QUESTIONS = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
ANSWERS = REPOSITORY / ".dflash" / "bench" / "gsm8k-answers.jsonl"
MODEL = REPOSITORY / ".dflash" / "models" / "smollm2"
END_IDS = (2,)
MAX_TOKENS = 128
# Prompts of a batch have like lengths, for padding costs as much as tokens; what is lost by a kill is a chunk.
CHUNK, BATCH = 96, 48


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's prompt and the target's greedy answer.

    Attributes:
        prompt: ids of the chat template around the question, up to where the target begins.
        answer: ids that it wrote, the end id included where it came to it; at most 128.
    """

    prompt: list[int]
    answer: list[int]

    @property
    def is_whole(self) -> bool:
        """Whether the target came to an end."""
        return self.answer[-1] in END_IDS


def questions() -> list[str]:
    """All questions in the order of the kept answers."""
    found = [json.loads(line)["question"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(found)
    return found


def answers(number: int, target: Any | None = None) -> list[Answer]:
    """The first `number` answers, from the file or written now; each chunk is kept as soon as it is there.

    Args:
        number: of answers.
        target: a `dflash.model.features.Target` that is loaded already; else it is loaded if it is needed.
    """
    lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.exists() else []
    found = [Answer(**json.loads(line)) for line in lines]
    if len(found) < number:
        found += _write(len(found), number, target)
    return found[:number]


def _write(start: int, end: int, target: Any | None) -> list[Answer]:
    from transformers import AutoTokenizer

    model = _load() if target is None else target.model
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], add_generation_prompt=True)["input_ids"]
        for one in questions()[start:end]
    ]
    written: list[Answer] = []
    ANSWERS.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(prompts), CHUNK):
        began = time.process_time()
        chunk = _decode(model, prompts[first : first + CHUNK])
        with ANSWERS.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(one)) + "\n" for one in chunk))
        written += chunk
        spent, num_tokens = time.process_time() - began, sum(len(one.answer) for one in chunk)
        sys.stderr.write(f"{start + len(written)} answers, {num_tokens / spent:.0f} tokens a CPU-second\n")
    return written


def _load() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ensure_smollm2(MODEL), dtype=torch.float32).eval()


def _decode(model: Any, prompts: Sequence[list[int]]) -> list[Answer]:
    """Answers in the order of the prompts."""
    from dflash.serving.decoding import Decoding, decode_batch

    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, Answer] = {}
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        written = decode_batch(model, [Decoding(prompts[index], MAX_TOKENS) for index in batch], END_IDS)
        found |= {index: Answer(prompts[index], ids) for index, ids in zip(batch, written, strict=True)}
    return [found[index] for index in range(len(prompts))]


def main() -> None:
    """Extend the file."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="answers to have in all")
    torch.set_num_threads(1)
    found = answers(parser.parse_args().number)
    whole = sum(one.is_whole for one in found)
    print(f"{len(found)} answers, {whole} of them whole, {sum(len(one.answer) for one in found):,} tokens in {ANSWERS}")


if __name__ == "__main__":
    main()
