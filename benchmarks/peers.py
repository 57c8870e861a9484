"""What others tokenize with, and the encoder alone, on the same records: tokens a CPU second.

A peer that isn't installed is left out of the table; `install_peers` unpacks those that pip has. All write what they
make to the disk, as they do in use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import interleave
from benchmarks.stages import make_shard
from dflash.config import TokenizeOptions
from dflash.data.completions import Completion, read_completions
from dflash.data.tokenizer import TargetTokenizer, load_tokenizer

PEERS = Path(__file__).resolve().parents[1] / ".dflash" / "peers" / "tokenizing"
PACKAGES = ("datatrove==0.10.1", "specforge==0.2.0", "fasteners", "humanize", "loguru")
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


def install_peers() -> None:
    """Unpack SpecForge and datatrove under `.dflash/peers`, without what they depend on and these paths don't use."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS)]
    subprocess.run([*pip, *PACKAGES], check=True)


def measure_peers(folder: Path, tokenizer: Path, num_records: int, repetitions: int) -> dict[str, Limit]:
    """Measure all that are installed, in turn, each in one thread a process.

    Args:
        folder: holds `batch`; the peers' files go beside it.
        tokenizer: folder of the tokenizer.
        num_records: of the batch's first files; the encoder alone, and our own way from a file to a shard in one
            process that has loaded the tokenizer, take ten times as many, or the encoder's cache of words would know
            them all by the second repetition.
        repetitions: of which medians are taken.
    """
    os.environ.update(RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1", TOKENIZERS_PARALLELISM="false")
    target = load_tokenizer(tokenizer)
    part = _part(folder, "part", num_records)
    encoder, more = EncoderAlone(part, target), EncoderAlone(_part(folder, "more", 10 * num_records), target)
    texts = encoder.texts
    candidates: dict[str, Callable[[], object]] = {
        "datasets.map": lambda: datasets_map(part, tokenizer, folder / "peer"),
        "transformers loop, assistant mask": lambda: assistant_mask(part, tokenizer),
        "encoder alone": more,
        "file to shard": lambda: make_shard(folder / "more" / "part.jsonl", folder, target, TokenizeOptions()),
    }
    if PEERS.is_dir():
        sys.path.append(str(PEERS))
        candidates["SpecForge's preparation"] = lambda: specforge_prepare(part, tokenizer, folder / "specforge")
        candidates["datatrove's tokenizer, no mask"] = lambda: datatrove_step(texts, tokenizer, folder / "datatrove")
    costs = interleave(candidates, repetitions)
    found = {name: Limit(num_records, encoder.num_tokens, cost.cpu_s) for name, cost in costs.items()}
    for name in ("encoder alone", "file to shard"):
        found[name] = Limit(more.num_samples, more.num_tokens, costs[name].cpu_s)
    return found


def _part(folder: Path, name: str, num_records: int) -> Path:
    """A folder with one file of the batch's first records."""
    lines = itertools.chain.from_iterable(path.open() for path in sorted((folder / "batch").glob("*.jsonl")))
    part = folder / name
    part.mkdir()
    (part / "part.jsonl").write_text("".join(itertools.islice(lines, num_records)))
    return part


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


def specforge_prepare(batch: Path, tokenizer: Path, folder: Path) -> None:
    """The preparation of SpecForge's trainers, two processes, its template for this family."""
    import datasets
    from specforge.data.preprocessing import build_eagle3_dataset
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(folder, ignore_errors=True)
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = datasets.Dataset.from_list([{"conversations": json.loads(line)["messages"]} for line in _lines(batch)])
    with contextlib.redirect_stdout(sys.stderr):
        made = build_eagle3_dataset(rows, loaded, chat_template="qwen3.5", max_length=8192, num_proc=2)
    made.save_to_disk(str(folder))


def datatrove_step(texts: list[str], tokenizer: Path, folder: Path) -> None:
    """Datatrove's tokenizer step over texts that are rendered already; it makes no mask."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    step = DocumentTokenizer(
        str(folder), str(tokenizer / "tokenizer.json"), shuffle_documents=False, save_final_metadata=False
    )
    step.run(Document(text=text, id=str(number)) for number, text in enumerate(texts))


class EncoderAlone:
    """Our encoder over all rendered texts, loaded and proven before the clock starts."""

    def __init__(self, batch: Path, target: TargetTokenizer) -> None:
        records = [entry for path in sorted(batch.glob("*.jsonl")) for entry in read_completions(path, file=path.name)]
        self.texts = [
            target.template.render(entry.messages, entry.tools, entry.chat_template_kwargs, add_generation_prompt=False)
            for entry in records
            if isinstance(entry, Completion)
        ]
        self.choice = target.encoder_for(self.texts[:10])
        ids, _ = self.choice.encoder.encode_batch_flat(self.texts, allow_special=True)
        self.num_tokens = len(ids)
        self.num_samples = len(self.texts)

    def __call__(self) -> None:
        """Encode everything once."""
        self.choice.encoder.encode_batch_flat(self.texts, allow_special=True)


def _lines(batch: Path) -> list[str]:
    return [line for path in sorted(batch.glob("*.jsonl")) for line in path.read_text().splitlines()]
