"""Held-out acceptance length by CPU seconds of the drafter, on GSM8K answers of the small target, against a reference.

The reference is an untuned drafter of the same kind, trained and measured on the same target and task (one layer,
blocks of 8, no warm start); its figures are constants here. Ours trains through the same engine as `dflash train`, with
features computed beforehand, so that the clock runs for the drafter alone, as it did for the reference. Tau is of
greedy decoding of held-out problems: at every mark replayed on the target's own answers (`replayed_tau`, seconds), at
the last mark also running free (about ten minutes on one core), which has to say the same.

    python benchmarks/acceptance.py [--cpu-seconds 60 120 240] [--json]

The target's answers are written once (about 10 minutes on one core) and kept in .dflash/bench.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.answers import END_IDS, MAX_TOKENS, MODEL, Answer, answers  # noqa: E402
from benchmarks.measure import print_table  # noqa: E402
from benchmarks.replayed_tau import ReplayedTau  # noqa: E402
from dflash.data.batches import BatchState, Pack  # noqa: E402
from dflash.data.row_reader import Row  # noqa: E402
from dflash.eval.acceptance import evaluate  # noqa: E402
from dflash.eval.prompts import Prompt  # noqa: E402
from dflash.eval.speculate import DecodeOptions, Speculator  # noqa: E402
from dflash.model.drafter import Drafter  # noqa: E402
from dflash.model.features import Target  # noqa: E402
from dflash.train.config import DrafterChoices, OptimizerConfig, ReplayConfig, TrainConfig  # noqa: E402
from dflash.train.engine import Engine  # noqa: E402
from dflash.train.feature_source import ComputedFeatures  # noqa: E402
from dflash.train.preflight import drafter_config  # noqa: E402
from dflash.train.replay import Features  # noqa: E402
from dflash.train.setup import build_drafter  # noqa: E402
from dflash.train.vocabulary import LossVocabulary  # noqa: E402
from dflash.train.warm_start import warm_start  # noqa: E402
from dflash.train.world import World  # noqa: E402
from embedded.smollm2 import ensure_smollm2  # noqa: E402

REFERENCE = {60: 1.23, 120: 1.34, 240: 1.50, 360: 1.55, 480: 1.60, 600: 1.62, 700: 1.625}
NUM_ROWS, NUM_HELD_OUT = 384, 30
LAYERS = (1, 8, 14, 20, 27)
CONFIG = TrainConfig(
    drafter=DrafterChoices(
        num_hidden_layers=1, block_size=8, target_layer_ids=LAYERS, intermediate_size=768, mask_token_id=16
    ),
    optimizer=OptimizerConfig(learning_rate=4e-4),
    replay=ReplayConfig(max_bytes=2_000_000_000, dtype="float32", steps=1),
    num_anchors=32,
    loss_vocab_size=4608,
    warm_start=True,
)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-seconds", type=float, nargs="+", default=[float(mark) for mark in REFERENCE])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(str(ensure_smollm2(MODEL)), LAYERS, dtype=torch.float32)
    known = answers(NUM_ROWS + NUM_HELD_OUT, target)
    held_out, marks = known[:NUM_HELD_OUT], sorted(arguments.cpu_seconds)
    replayed, table = ReplayedTau(target, held_out), []
    for mark, steps, drafter in train(target, rows_of(known[NUM_HELD_OUT:]), marks):
        tau, reference = replayed.of(drafter), REFERENCE.get(round(mark))
        row = {"drafter_cpu_s": mark, "steps": steps, "tau": round(tau, 3), "reference_tau": reference}
        row["accepted_ratio"] = None if reference is None else round((tau - 1) / (reference - 1), 2)
        row["tau_running_free"] = round(running_free(target, drafter, held_out), 3) if mark == marks[-1] else None
        table.append(row)
        sys.stderr.write(f"{row}\n")
    print_table(table, arguments.json)


def rows_of(found: list[Answer]) -> list[Row]:
    """Rows to train on."""
    rows = []
    for number, one in enumerate(found):
        mask = np.arange(len(one.prompt) + len(one.answer)) >= len(one.prompt)
        rows.append(Row((0, number), np.array(one.prompt + one.answer, dtype=np.int32), mask, str(number), ""))
    return rows


def running_free(target: Target, drafter: Drafter, held_out: list[Answer]) -> float:
    """Tau of decoding the held-out problems with drafter and target."""
    drafter.eval()
    prompts = [Prompt(str(number), "gsm8k", tuple(one.prompt)) for number, one in enumerate(held_out)]
    return evaluate(Speculator(target, drafter), prompts, DecodeOptions(MAX_TOKENS, END_IDS), compare=False).tau


def train(target: Target, rows: list[Row], marks: list[float]) -> Iterator[tuple[float, int, Drafter]]:
    """Train to the last mark; at each give the steps and the drafter."""
    drafter = build_drafter(CONFIG, drafter_config(CONFIG, target.text_config), target)
    features = Features(ComputedFeatures(target), CONFIG.replay, target.device)
    for row in rows:
        features.states(Pack((row,), 0, 0, BatchState()))
    counts = np.bincount(np.concatenate([row.input_ids[row.loss_mask] for row in rows]), minlength=len(target.head_VH))
    spent = -time.process_time()
    warm_start(drafter, target, features.draw(1000, 1, "warm start"), torch.from_numpy(counts))
    vocabulary = LossVocabulary.of(counts, CONFIG.loss_vocab_size or 0, target.head_VH)
    engine = Engine(CONFIG, drafter, target, features, World.current(), vocabulary)
    drafter.train()
    spent += time.process_time()
    step = 0
    for mark in marks:
        while spent < mark:
            started = time.process_time()
            engine.step(features.draw(256, 1, f"step {step}"), f"step {step}", min(spent / marks[-1], 1.0))
            spent += time.process_time() - started
            step += 1
        yield mark, step, drafter
        drafter.train()


if __name__ == "__main__":
    main()
