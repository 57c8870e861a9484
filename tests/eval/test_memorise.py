"""The whole chain in a minute: rows that the target wrote, learnt by heart, decoded losslessly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.answers import Answer
from benchmarks.replayed_tau import ReplayedTau
from dflash.data.batches import LocalShards
from dflash.eval.acceptance import Prompt, evaluate
from dflash.eval.speculate import DecodeOptions, Speculator, decode_plain
from dflash.model.features import Target
from dflash.train.checkpoint import load
from dflash.train.config import DrafterChoices, OptimizerConfig, ReplayConfig, TrainConfig
from dflash.train.loop import Run
from dflash.train.preflight import drafter_config
from dflash.train.setup import build_drafter

NEW_TOKENS = 32


def test_eight_rows_are_memorised_to_tau_three(targets: Callable[[str], Target], tmp_path: Path) -> None:
    target = targets("llama")
    rng = random.Random(9)
    prompts = [[rng.randrange(2, 96) for _ in range(5)] for _ in range(8)]
    answers = [decode_plain(target, prompt, DecodeOptions(NEW_TOKENS)).ids for prompt in prompts]
    table = pa.table(
        {
            "input_ids": pa.array([p + a for p, a in zip(prompts, answers, strict=True)], pa.list_(pa.int32())),
            "loss_mask": [[False] * 5 + [True] * NEW_TOKENS for _ in prompts],
            "sample_id": [str(place) for place in range(8)],
            "source": ["made"] * 8,
        }
    )
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    config = TrainConfig(
        drafter=DrafterChoices(num_hidden_layers=1, block_size=6, target_layer_ids=(0, 2), mask_token_id=1),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        replay=ReplayConfig(max_bytes=1 << 22, dtype="float32"),
        pack_tokens=512,
        num_anchors=128,
        num_epochs=None,
        max_steps=250,
    )
    drafter = build_drafter(config, drafter_config(config, target.text_config), target)
    asked = [Prompt(str(place), "rows", tuple(prompt)) for place, prompt in enumerate(prompts)]
    before = evaluate(Speculator(target, drafter), asked, DecodeOptions(NEW_TOKENS), compare=False)
    result = Run(config, target, drafter, LocalShards.scan([tmp_path / "rows.arrow"]), tmp_path / "run").train()
    drafter.load_state_dict(dict(load(result.checkpoint).weights))
    after = evaluate(Speculator(target, drafter), asked, DecodeOptions(NEW_TOKENS))
    assert before.tau < 1.5
    assert after.tau >= 3
    assert after.groups["overall"].num_identical == 8
    assert after.divergences == []
    # The benchmarks' shortcut counts the same rounds, but for the last one of each answer.
    known = [Answer(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert ReplayedTau(target, known).of(drafter) == pytest.approx(after.tau, abs=0.25)
