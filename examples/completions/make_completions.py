"""Lets SmolLM2-135M-Instruct answer the example prompts and writes `part-*.jsonl`.

Greedy decoding in float32 on one CPU thread, in batches of prompts of similar length, padded on
the left. What the model sampled is kept as it was: the token ids, the end token included, and the
text those ids decode to. A part that is there already is left alone, so that a stopped run goes on
where it was.

    python examples/completions/make_completions.py --model DIRECTORY [--check 8]

`DIRECTORY` is what `embedded.smollm2.ensure_smollm2` builds.
"""

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dflash.serving.decoding import Decoding, decode_batch

HERE = Path(__file__).parent
MODEL = "SmolLM2-135M-Instruct"
NUM_PARTS = 16
PARTS_AT_ONCE = 4  # their prompts are batched together: more of similar length
BATCH_ROWS = 108
MAX_NEW_TOKENS = 128

log = logging.getLogger("make_completions")


@dataclass(frozen=True, slots=True)
class Target:
    """The model and its tokenizer."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, directory: Path) -> "Target":
        """Reads a checkpoint directory, in float32."""
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(model.eval(), PreTrainedTokenizerFast.from_pretrained(directory))

    def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """Ids up to and including the header of the assistant's turn."""
        text = self.tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def continue_greedily(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sampled ids of each prompt, the end token included where the model came to it."""
        end: int = self.tokenizer.eos_token_id
        return decode_batch(self.model, [Decoding(ids, MAX_NEW_TOKENS) for ids in prompts], {end})


def main() -> None:
    """Writes the parts that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--check", type=int, default=0, help="only compare N rows with one by one")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    target = Target.load(arguments.model)
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    if arguments.check:
        compare_with_single(target, prompts, arguments.check)
        return
    missing = [index for index in range(NUM_PARTS) if not part(index).exists()]
    for start in range(0, len(missing), PARTS_AT_ONCE):
        indices = missing[start : start + PARTS_AT_ONCE]
        chosen = [prompts[index::NUM_PARTS] for index in indices]
        records = answer(target, [prompt for share in chosen for prompt in share])
        for index, share in zip(indices, chosen, strict=True):
            write_whole(part(index), [records[prompt["id"]] for prompt in share])
            log.info("wrote %s", part(index).name)


def part(index: int) -> Path:
    """Path of one file of completions."""
    return HERE / f"part-{index:05d}.jsonl"


def answer(target: Target, prompts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Answers the prompts, those of similar length together, and returns the records by id."""
    ids = {prompt["id"]: target.prompt_ids(prompt) for prompt in prompts}
    ordered = sorted(prompts, key=lambda prompt: len(ids[prompt["id"]]))
    records: dict[str, dict[str, Any]] = {}
    for start in range(0, len(ordered), BATCH_ROWS):
        batch = ordered[start : start + BATCH_ROWS]
        answers = target.continue_greedily([ids[prompt["id"]] for prompt in batch])
        for prompt, sampled in zip(batch, answers, strict=True):
            records[prompt["id"]] = completion(target, prompt, ids[prompt["id"]], sampled)
        log.info("%d of %d", len(records), len(prompts))
    return records


def completion(target: Target, prompt: dict[str, Any], prompt_ids: list[int], sampled: list[int]) -> dict[str, Any]:
    """Builds one record; the text is exactly what the sampled ids decode to."""
    stopped = sampled[-1] == target.tokenizer.eos_token_id
    text = target.tokenizer.decode(sampled[:-1] if stopped else sampled)
    if not text.strip():
        log.warning("%s has an empty answer", prompt["id"])
    return {
        "id": prompt["id"],
        "messages": [*prompt["messages"], {"role": "assistant", "content": text}],
        "source": prompt["source"],
        "model": MODEL,
        "finish_reason": "stop" if stopped else "length",
        "output_tokens": len(sampled),
        "output_token_ids": sampled,
        "prompt_token_ids": prompt_ids,
        "sampling": {"temperature": 0, "max_tokens": MAX_NEW_TOKENS},
    }


def compare_with_single(target: Target, prompts: list[dict[str, Any]], count: int) -> None:
    """Logs how many rows of a batch come out the same when they are generated alone."""
    ids = [target.prompt_ids(prompt) for prompt in prompts[:count]]
    batched = target.continue_greedily(ids)
    alone = [target.continue_greedily([row])[0] for row in ids]
    same = sum(one == other for one, other in zip(batched, alone, strict=True))
    log.info("%d of %d rows are the same batched and alone", same, count)


def write_whole(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes a file that is either whole or absent."""
    unfinished = path.with_suffix(".unfinished")
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
