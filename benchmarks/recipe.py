"""The half-hour recipe, measured: from kept answers of the small target to tau on held-out questions, all in one JSON.

The small target's answers to GSM8K questions become completions, those become a dataset, `dflash train` trains on it
with `deployments/runs/smollm2.toml` on two cores, and the checkpoints are measured on questions that it never saw.

    python benchmarks/recipe.py [--answers 1150] [--seconds 1800] [--set train.optimizer.learning_rate=6e-4]

The answers are written once (`benchmarks/answers.py`); everything else is made anew in .dflash/bench/recipe.
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
import shutil  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.answers import MAX_TOKENS, MODEL, Answer, answers, questions  # noqa: E402
from benchmarks.measure import machine  # noqa: E402
from dflash.config import GateThresholds, TokenizeRun  # noqa: E402
from dflash.data.tokenize_run import tokenize_dataset  # noqa: E402
from dflash.data.workspace import Workspace  # noqa: E402
from dflash.eval.config import DecodeConfig, EvaluateRun  # noqa: E402
from dflash.train.curves import read_metrics  # noqa: E402

RECIPE = REPOSITORY / "deployments" / "runs" / "smollm2.toml"
WORK = REPOSITORY / ".dflash" / "bench" / "recipe"
RESULT = REPOSITORY / ".dflash" / "bench" / "recipe.json"
NUM_HELD_OUT, NUM_COMPARED, NUM_PARTS, NUM_POINTS = 30, 3, 8, 200


@dataclass(frozen=True, slots=True)
class Places:
    """What a run works on; all below one folder.

    Attributes:
        folder: of this run.
    """

    folder: Path

    @property
    def completions(self) -> Path:
        """JSON Lines of the answers to train on."""
        return self.folder / "completions"

    @property
    def held_out(self) -> Path:
        """JSON Lines of the questions to measure on."""
        return self.folder / "heldout.jsonl"

    @property
    def dataset(self) -> Path:
        """Dataset root."""
        return self.folder / "dataset"

    @property
    def run(self) -> Path:
        """Checkpoints and metrics."""
        return self.folder / "run"


def main() -> None:
    """Parse the command line, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1150, help=f"answers in all; {NUM_HELD_OUT} are held out")
    parser.add_argument("--seconds", type=float, help="wall clock of training in place of the recipe's")
    parser.add_argument("--set", action="append", default=[], help="one more setting of `dflash train`; repeatable")
    parser.add_argument("--checkpoints", type=int, default=6, help="of the way that are measured, beside the last")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    places = Places(WORK)
    shutil.rmtree(WORK, ignore_errors=True)
    found = answers(arguments.answers)
    write_records(places, found)
    dataset = publish(places)
    trained = train(places, arguments.seconds, arguments.set)
    result = {
        "machine": machine(),
        "dataset": dataset,
        "settings": arguments.set,
        "seconds": trained["seconds"],
        "steps": trained["step"],
        "wall_s": trained["wall_s"],
        "tau": measure(places, Path(trained["checkpoint"])),
        "tau_along": tau_along(places, found[:NUM_HELD_OUT], arguments.checkpoints),
        "curve": curve(places),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "curve"}, indent=1))


def write_records(places: Places, found: list[Answer]) -> None:
    """Write completions and held-out questions as anybody would hand them in."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    pairs = list(enumerate(zip(questions(), found, strict=False)))
    records = [
        {
            "id": f"gsm8k-{number:05d}",
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": tokenizer.decode(one.answer[:-1] if one.is_whole else one.answer)},
            ],
            "source": "gsm8k",
            "finish_reason": "stop" if one.is_whole else "length",
            "output_tokens": len(one.answer),
            "output_token_ids": one.answer,
            "prompt_token_ids": one.prompt,
        }
        for number, (question, one) in pairs[NUM_HELD_OUT:]
    ]
    prompts = [
        {"id": f"gsm8k-{number:05d}", "source": "gsm8k", "messages": [{"role": "user", "content": question}]}
        for number, (question, _) in pairs[:NUM_HELD_OUT]
    ]
    places.completions.mkdir(parents=True)
    for part in range(NUM_PARTS):
        _write(places.completions / f"part-{part:05d}.jsonl", records[part::NUM_PARTS])
    _write(places.held_out, prompts)


def publish(places: Places) -> dict[str, Any]:
    """Tokenize the completions into a dataset; most answers were cut at their limit, which the gate is told."""
    run = TokenizeRun(
        source=str(places.completions),
        dataset=str(places.dataset),
        tokenizer=str(MODEL),
        files_per_shard=NUM_PARTS // 2,
        gate=GateThresholds(max_length_cut_share=1.0),
    )
    workspace = Workspace(places.folder / "work", places.folder / "cache")
    counts = tokenize_dataset(run, None, workspace).counts
    return {"rows": counts.num_rows, "tokens": counts.num_tokens, "loss_tokens": counts.num_loss_tokens}


def train(places: Places, seconds: float | None, settings: list[str]) -> dict[str, Any]:
    """Run `dflash train` with the recipe; its result, with its wall clock."""
    values = [
        f"dataset={places.dataset}",
        f"output={places.run}",
        f"target={MODEL}",
        "train.checkpoint_every=500",
        "train.keep_checkpoints=1000",
        *([] if seconds is None else [f"train.max_seconds={seconds}"]),
        *settings,
    ]
    command = [str(Path(sys.executable).with_name("dflash")), "train", "--config", str(RECIPE), "--json"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *(word for value in values for word in ("--set", value))], stdout=subprocess.PIPE, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"wall_s": round(time.monotonic() - started, 1)}


def measure(places: Places, last: Path) -> dict[str, Any]:
    """Free-running tau of the untrained drafter and of the last checkpoint, which is also held against greedy ids."""
    compared = evaluate(places, last, NUM_COMPARED, compare=True)
    return {
        "before": untrained_tau(places, last),
        "after": evaluate(places, last, NUM_HELD_OUT)["tau"],
        "num_prompts": NUM_HELD_OUT,
        "max_new_tokens": MAX_TOKENS,
        "identical_to_greedy": f"{compared['num_identical']} of {compared['num_prompts']}",
    }


def tau_along(places: Places, held_out: list[Answer], number: int) -> list[dict[str, Any]]:
    """Tau of checkpoints spread over the way, on the known answers to the held-out questions."""
    import torch

    from benchmarks.replayed_tau import ReplayedTau
    from dflash.eval.subject import open_subject
    from dflash.model.features import Target

    paths = sorted((places.run / "checkpoints").glob("step-*"))
    seconds = {row["step"]: row["seconds"] for row in read_metrics(places.run)}
    subjects = [open_subject(str(path), None, places.folder / "cache") for path in _spread(paths, number)]
    target = Target.load(str(MODEL), subjects[0].config.target_layer_ids, dtype=torch.float32)
    replayed = ReplayedTau(target, held_out)
    found = []
    for one in subjects:
        step = int(one.step or 0)
        found.append({"step": step, "seconds": round(seconds[step], 1), "tau": round(replayed.of(one.load()), 3)})
        sys.stderr.write(f"{found[-1]}\n")
    return found


def _spread(paths: list[Path], number: int) -> list[Path]:
    """The last path, and up to `number` before it at equal distances."""
    kept = {len(paths) * place // (number + 1) for place in range(1, number + 1)} | {len(paths) - 1}
    return [paths[place] for place in sorted(kept)]


def evaluate(places: Places, checkpoint: Path, limit: int, *, compare: bool = False) -> dict[str, Any]:
    """Held-out, free-running tau by the product's own evaluation, which also looks for leaks."""
    from dflash.eval.job import evaluate_run

    return evaluate_run(
        _evaluation(places, checkpoint, limit, compare=compare), None, places.folder / "cache"
    ).summary()


def untrained_tau(places: Places, checkpoint: Path) -> float:
    """Tau of the same network with the weights as they are drawn; a few tokens of a few prompts tell."""
    from dflash.data.tokenizer import load_tokenizer
    from dflash.eval import acceptance
    from dflash.eval.job import decode_options, load_speculator
    from dflash.eval.prompts import read_prompts
    from dflash.eval.speculate import Speculator
    from dflash.eval.subject import open_subject
    from dflash.model.drafter import Drafter

    run = _evaluation(places, checkpoint, 5, compare=False, max_tokens=24)
    tokenizer = load_tokenizer(str(MODEL))
    subject = open_subject(str(checkpoint), None, places.folder / "cache")
    target = load_speculator(run, subject, str(MODEL)).target
    prompts = read_prompts(run.prompts, tokenizer, {}, run.limit)
    drafter = Speculator(target, Drafter(subject.config))
    return acceptance.evaluate(drafter, prompts, decode_options(run, target, tokenizer), compare=False).tau


def curve(places: Places) -> list[dict[str, Any]]:
    """Loss and accuracy along the run, as means over equal parts of it."""
    rows = read_metrics(places.run)
    size = max(1, len(rows) // NUM_POINTS)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        {
            "step": part[-1]["step"],
            "seconds": round(part[-1]["seconds"], 1),
            "epoch": part[-1]["epoch"],
            "loss": round(sum(row["loss"] for row in part) / len(part), 4),
            "accuracy": round(sum(row["accuracy"] for row in part) / len(part), 4),
        }
        for part in parts
    ]


def _evaluation(
    places: Places, checkpoint: Path, limit: int, *, compare: bool, max_tokens: int = MAX_TOKENS
) -> EvaluateRun:
    return EvaluateRun(
        checkpoint=str(checkpoint),
        target=str(MODEL),
        prompts=str(places.held_out),
        decode=DecodeConfig(max_new_tokens=max_tokens),
        limit=limit,
        compare=compare,
        device="cpu",
    )


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
