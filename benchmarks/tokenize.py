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
from benchmarks.peers import EncoderAlone, datasets_map  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.data.tokenize_run import tokenize_dataset  # noqa: E402
from dflash.data.tokenizer import load_tokenizer  # noqa: E402
from dflash.data.workspace import Workspace  # noqa: E402


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
        encoder = EncoderAlone(batch, load_tokenizer(arguments.tokenizer))
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
