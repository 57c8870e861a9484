"""The whole local path against `datasets.map` as people write it, and against the encoder alone, in one run.

    python benchmarks/tokenize.py [--records 800] [--tokens 2000] [--repetitions 3] [--tokenizer DIR] [--json]

Peer (a): `datasets.map(num_proc=2)` over `apply_chat_template`, offsets, and a search for the last assistant header.
Limit (b): our encoder over the rendered texts, one process, nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# This file's own folder would shadow the standard module `tokenize`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.corpus import write_batch  # noqa: E402
from benchmarks.measure import Cost, interleave, print_table  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.data.tokenize_run import tokenize_dataset  # noqa: E402
from dflash.data.workspace import Workspace  # noqa: E402

HEADER = "<|im_start|>assistant\n"


def ours(batch: Path, tokenizer: Path, folder: Path) -> None:
    """From JSON Lines to a published version, two processes, from cold."""
    shutil.rmtree(folder, ignore_errors=True)
    run = TokenizeRun(
        source=str(batch),
        dataset=str(folder / "dataset"),
        tokenizer=str(tokenizer),
        files_per_shard=1,
        num_workers=2,
        gate=GateThresholds(max_window_cut_share=1.0),
    )
    tokenize_dataset(run, None, Workspace(folder / "work", folder / "cache"))


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


class EncoderAlone:
    """Our encoder over all rendered texts, loaded and proven before the clock starts."""

    def __init__(self, batch: Path, tokenizer: Path) -> None:
        from dflash.data.completions import Completion, read_completions
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


def rows_of(costs: dict[str, Cost], num_records: int, num_tokens: int) -> list[dict[str, Any]]:
    """Table rows with ratios to the peer and to the limit."""
    peer, limit = costs["datasets.map"].cpu_s, costs["encoder alone"].cpu_s
    return [
        {
            "path": name,
            "wall s": round(cost.wall_s, 2),
            "CPU s": round(cost.cpu_s, 2),
            "samples/CPU-s": round(num_records / cost.cpu_s, 1),
            "M tokens/CPU-s": round(num_tokens / cost.cpu_s / 1e6, 3),
            "x datasets.map": round(peer / cost.cpu_s, 2),
            "share of encoder": round(limit / cost.cpu_s, 3),
        }
        for name, cost in costs.items()
    ]


def main() -> None:
    """Build a batch, run the three in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=800)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=Path(".dflash/models/qwen3.6-tokenizer"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, batch = Path(name), Path(name) / "batch"
        write_batch(batch, 4, arguments.records // 4, arguments.tokens)
        encoder = EncoderAlone(batch, arguments.tokenizer)
        costs = interleave(
            {
                "ours": lambda: ours(batch, arguments.tokenizer, folder / "ours"),
                "datasets.map": lambda: datasets_map(batch, arguments.tokenizer, folder / "peer"),
                "encoder alone": encoder,
            },
            arguments.repetitions,
        )
        print_table(rows_of(costs, arguments.records, encoder.num_tokens), arguments.json)


if __name__ == "__main__":
    main()
