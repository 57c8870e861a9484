"""What others tokenize with, and the encoder alone, on the same records: tokens a CPU second.

A peer that isn't installed is left out of the table. All write what they make to the disk, as they do in use.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import interleave
from dflash.data.completions import Completion, read_completions

HEADER = "<|im_start|>assistant\n"
# TRL's and transformers' masks need templates that mark what the assistant says.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}<think>\n"
    "{{ m.reasoning_content | trim }}\n</think>\n\n{{ m.content | trim }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """Median cost of one pass over `num_tokens` tokens."""

    num_samples: int
    num_tokens: int
    cpu_s: float

    @property
    def tokens_per_cpu_s(self) -> float:
        """Speed."""
        return self.num_tokens / self.cpu_s

    def row(self) -> dict[str, Any]:
        """For a table."""
        return {
            "samples/CPU-s": round(self.num_samples / self.cpu_s, 1),
            "M tokens/CPU-s": round(self.tokens_per_cpu_s / 1e6, 3),
        }


def measure_peers(folder: Path, tokenizer: Path, num_records: int, repetitions: int) -> dict[str, Limit]:
    """Measure all that are installed, in turn.

    Args:
        folder: holds `batch`; the peers' files go beside it.
        tokenizer: folder of the tokenizer.
        num_records: of the batch's first files.
        repetitions: of which medians are taken.
    """
    lines = itertools.chain.from_iterable(path.open() for path in sorted((folder / "batch").glob("*.jsonl")))
    part = folder / "part"
    part.mkdir()
    (part / "part.jsonl").write_text("".join(itertools.islice(lines, num_records)))
    encoder = EncoderAlone(part, tokenizer)
    candidates: dict[str, Callable[[], object]] = {
        "datasets.map": lambda: datasets_map(part, tokenizer, folder / "peer"),
        "transformers loop, assistant mask": lambda: assistant_mask(part, tokenizer),
        "encoder alone": encoder,
    }
    try:
        import speculators.data_generation.preprocessing as preparation
    except ImportError:
        pass
    else:
        candidates["speculators' preparation"] = lambda: speculators_prepare(preparation, part, tokenizer)
    costs = interleave(candidates, repetitions)
    return {name: Limit(num_records, encoder.num_tokens, cost.cpu_s) for name, cost in costs.items()}


def datasets_map(batch: Path, tokenizer: Path, folder: Path) -> None:
    """What a user writes: map with two processes, offsets, last assistant header, save_to_disk."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(folder, ignore_errors=True)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def encode(record: dict[str, Any]) -> dict[str, Any]:
        text = loaded.apply_chat_template(record["messages"], tokenize=False)
        encoding = loaded(text, add_special_tokens=False, return_offsets_mapping=True, truncation=True, max_length=8192)
        start = text.rindex(HEADER) + len(HEADER)
        mask = [first >= start for first, _ in encoding["offset_mapping"]]
        return {"input_ids": encoding["input_ids"], "loss_mask": mask}

    rows = datasets.load_dataset(
        "json", data_files=sorted(map(str, batch.glob("*.jsonl"))), split="train", cache_dir=str(folder / "cache")
    )
    rows.map(encode, num_proc=2, remove_columns=rows.column_names).save_to_disk(str(folder / "dataset"))


def assistant_mask(batch: Path, tokenizer: Path) -> None:
    """TRL's way, in one process: `return_assistant_tokens_mask` with a template that marks the assistant's text."""
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for line in _lines(batch):
        loaded.apply_chat_template(
            json.loads(line)["messages"],
            chat_template=MARKED,
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=8192,
        )


def speculators_prepare(preparation: Any, batch: Path, tokenizer: Path) -> None:
    """The preparation of speculators' own trainer, two processes."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = datasets.Dataset.from_list(
        [
            {"conversations": [{"role": m["role"], "content": m["content"]} for m in json.loads(line)["messages"]]}
            for line in _lines(batch)
        ]
    )
    preparation.build_eagle3_dataset(rows, loaded, max_length=8192, num_proc=2)


class EncoderAlone:
    """Our encoder over all rendered texts, loaded and proven before the clock starts."""

    def __init__(self, batch: Path, tokenizer: Path) -> None:
        from dflash.data.tokenizer import load_tokenizer

        target = load_tokenizer(tokenizer)
        records = [entry for path in sorted(batch.glob("*.jsonl")) for entry in read_completions(path, file=path.name)]
        self._texts = [
            target.template.render(entry.messages, entry.tools, entry.chat_template_kwargs, add_generation_prompt=False)
            for entry in records
            if isinstance(entry, Completion)
        ]
        self.choice = target.encoder_for(self._texts[:10])
        ids, _ = self.choice.encoder.encode_batch_flat(self._texts, allow_special=True)
        self.num_tokens = len(ids)

    def __call__(self) -> None:
        """Encode everything once."""
        self.choice.encoder.encode_batch_flat(self._texts, allow_special=True)


def _lines(batch: Path) -> list[str]:
    return [line for path in sorted(batch.glob("*.jsonl")) for line in path.read_text().splitlines()]
