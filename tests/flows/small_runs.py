"""Runs over batches of a few rows, each file a shard."""

from __future__ import annotations

from pathlib import Path

from dflash.config import GateThresholds, TokenizeRun

# Completions of the small target are capped at 128 tokens, and batches here repeat them.
LOOSE_GATE = GateThresholds(
    max_length_cut_share=1.0, max_duplicate_share=1.0, max_single_loss_count_share=1.0, max_tiny_mask_share=1.0
)


def small_run(source: Path | str, dataset: Path | str, tokenizer: Path) -> TokenizeRun:
    """A run by one process, a shard a file."""
    return TokenizeRun(
        source=str(source),
        dataset=str(dataset),
        tokenizer=str(tokenizer),
        files_per_shard=1,
        num_workers=1,
        gate=LOOSE_GATE,
    )
