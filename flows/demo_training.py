"""The demo's second half: a drafter for the small target, trained on what the first half published.

The deployment `train-drafter` is run as from the UI: it trains on the pool b200, measures on held-out prompts and
exports. What a person wants to see beside it is made here: tau before any training, the curves, one coloured answer.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from typing import Any

from dflash.eval.config import DecodeConfig
from dflash.manifest import fingerprint_of
from dflash.runs import DrafterRun
from dflash.train.curves import PICTURE
from dflash.train.launch import run_dir_of
from embedded.smollm2 import ensure_smollm2
from embedded.stack import StackConnection
from flows.demo_steps import EXAMPLES, REPOSITORY, Demo, put_files, run_deployed

RECIPE = REPOSITORY / "deployments" / "runs" / "smollm2-demo.toml"
NUM_PROMPTS, MAX_NEW_TOKENS = 12, 48
MAX_TOKENS_BEFORE = 16  # an untrained drafter drafts nothing: each token is a pass of the target, and a few tell


def train_on(demo: Demo, stack: StackConnection, dataset: str) -> dict[str, Any]:
    """Train, evaluate, export and show.

    Returns:
        `tau_before`, `tau_after`, places of drafter, export and curves.

    Raises:
        ServiceError: the deployed flow failed.
    """
    with demo.step("target"):
        target = ensure_smollm2(demo.project / ".dflash" / "models" / "smollm2")
    prompts = put_files(stack, "prompts/examples", [EXAMPLES / "heldout_prompts.jsonl"])
    config = drafter_run(dataset, str(target), prompts, f"s3://{stack.bucket}/drafters/demo")
    with demo.step("train, evaluate, export"):
        result = run_deployed(config, "train-drafter/train-drafter")
    with demo.step("tau before training"):
        before = show_before_and_after(demo, config, result["checkpoint"], stack)
    curves = demo.project / ".dflash" / "demo-curves.png"
    run_dir = run_dir_of(config.training(result["manifest"]).output, demo.project / ".dflash" / "work")
    shutil.copyfile(run_dir / PICTURE, curves)
    demo.console.print(
        f"[bold]tau {before:.2f} before training, {result['tau']:.2f} after {result['step']:,} steps[/bold] on "
        f"{NUM_PROMPTS} held-out prompts (before: the first {MAX_TOKENS_BEFORE} tokens of each)\n"
        f"Drafter         {result['export']}\nCurves          {curves}"
    )
    return {
        "tau_before": before,
        "tau_after": result["tau"],
        "drafter": result["checkpoint"],
        "export": result["export"],
        "curves": str(curves),
        "train_steps": result["step"],
        "train_flow_run_url": result["flow_run_url"],
    }


def drafter_run(dataset: str, target: str, prompts: str, output: str) -> DrafterRun:
    """The demo's parameters of `train-drafter`; another dataset or recipe trains in another folder."""
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    name = fingerprint_of({"dataset": dataset, "recipe": recipe})[:12]
    values = {
        "run": recipe | {"dataset": dataset, "target": target, "output": f"{output}-{name}"},
        "prompts": prompts,
        "decode": DecodeConfig(max_new_tokens=MAX_NEW_TOKENS),
        "num_prompts": NUM_PROMPTS,
    }
    return DrafterRun.model_validate(values)


def show_before_and_after(demo: Demo, config: DrafterRun, checkpoint: str, stack: StackConnection) -> float:
    """Print one answer with the trained drafter's share coloured; return tau of the weights as they were drawn."""
    from dflash.data.tokenizer import load_tokenizer
    from dflash.eval.acceptance import evaluate
    from dflash.eval.coloured import render
    from dflash.eval.job import decode_options, load_speculator
    from dflash.eval.prompts import read_prompts
    from dflash.eval.speculate import Speculator
    from dflash.eval.subject import open_subject
    from dflash.model.drafter import Drafter

    run = config.evaluation(checkpoint, "", compare=False)
    tokenizer = load_tokenizer(config.run.target)
    prompts = read_prompts(run.prompts, tokenizer, run.decode.chat_template_kwargs, run.limit, stack.s3)
    subject = open_subject(checkpoint, stack.s3, demo.project / ".dflash" / "cache")
    trained = load_speculator(run, subject, config.run.target)
    options = decode_options(run, trained.target, tokenizer)
    demo.console.print(render(trained.decode(prompts[0].ids, options), tokenizer))
    untrained = Speculator(trained.target, Drafter(subject.config))
    return evaluate(untrained, prompts, replace(options, max_new_tokens=MAX_TOKENS_BEFORE), compare=False).tau
