"""`dflash demo --generate`: the whole loop with a real model over real HTTP, all of it by deployments on the workers.

The small target is served by `dflash serve`; it answers the example prompts in two batches. The first becomes version 1
of a dataset, the second is merged behind it, a drafter is trained on the result, measured on held-out prompts and
exported. Everything is small: the loop is shown, not a good drafter.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash.config import GateThresholds, MergeRun, TokenizeRun
from dflash.data.plan import CODE_VERSION
from dflash.generate.config import GenerateRun, SamplingOptions
from dflash.manifest import fingerprint_of
from dflash.runs import DrafterRun
from embedded.model_server import start_model_server
from embedded.smollm2 import ensure_smollm2
from embedded.stack import StackConnection
from flows.demo_steps import EXAMPLES, REPOSITORY, Demo, run_deployed, start_stack

BATCHES = ("first", "second")
NUM_PROMPTS = 32  # in each batch: less than a minute of decoding
MAX_TOKENS = 40
TRAIN_SECONDS = 60
NUM_HELD_OUT = 4  # a pass of the target costs up to 0.3 CPU-seconds, and plain decoding is measured beside it
HELD_OUT_TOKENS = 24
RECIPE = REPOSITORY / "deployments" / "runs" / "smollm2.toml"


def run_generate_demo(project: Path, console: Console) -> dict[str, Any]:
    """Run the loop; write `.dflash/demo-generate.json` and return it.

    Raises:
        ServiceError: a server did not start, or a deployed flow failed.
    """
    demo = Demo(project, console)
    stack = start_stack(demo)
    with demo.step("target"):
        target = ensure_smollm2(project / ".dflash" / "models" / "smollm2")
    results: dict[str, Any] = {}
    with serving(target, project, demo) as url:
        for name in BATCHES:
            with demo.step(f"generate {name}"):
                results[f"generate_{name}"] = run_deployed(
                    generation(stack, project, url, name), "generate-completions/generate-completions"
                )
    batch = results["generate_first"]["batch"]
    dataset = batch.replace("/generated/", "/datasets/loop-").rpartition("/")[0]
    tokenize = tokenizing(batch, dataset, target)
    with demo.step("tokenize"):
        results["tokenize"] = run_deployed(tokenize)
    with demo.step("merge"):
        second = tokenize.model_copy(update={"source": results["generate_second"]["batch"]})
        results["merge"] = run_deployed(MergeRun(batch=second), "merge-dataset/merge-dataset")
    with demo.step("train, evaluate, export"):
        results["drafter"] = run_deployed(drafting(dataset, target), "train-drafter/train-drafter")
    summary = results | {"seconds": dict(demo.seconds), "target": str(target)}
    (project / ".dflash" / "demo-generate.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(f"[bold]{dataset}[/bold]: {results['merge']['rows']} rows; {results['drafter']}", markup=True)
    return summary


def generation(stack: StackConnection, project: Path, url: str, name: str) -> GenerateRun:
    """One batch: its own share of the example prompts, put on the store."""
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    start = BATCHES.index(name) * NUM_PROMPTS
    share = "".join(lines[start : start + NUM_PROMPTS])
    path = project / ".dflash" / f"demo-prompts-{name}.jsonl"
    path.write_text(share, encoding="utf-8")
    sampling = SamplingOptions(temperature=0.7, max_tokens=MAX_TOKENS)
    # A second demo finds the batch complete; other prompts or sampling make another batch.
    digest = fingerprint_of({"prompts": "".join(lines), "sampling": sampling.model_dump(), "code": CODE_VERSION})[:12]
    return GenerateRun(
        prompts=str(path),
        batch=f"s3://{stack.bucket}/generated/{digest}/{name}",
        endpoints=(url,),
        sampling=sampling,
        max_in_flight=NUM_PROMPTS,
    )


def tokenizing(batch: str, dataset: str, target: Path) -> TokenizeRun:
    """A small batch of short answers needs loose limits."""
    gate = GateThresholds(max_length_cut_share=1.0, max_single_loss_count_share=1.0, max_tiny_mask_share=0.5)
    return TokenizeRun(source=batch, dataset=dataset, tokenizer=str(target), gate=gate)


def drafting(dataset: str, target: Path) -> DrafterRun:
    """A minute of training, by the recipe for the small target."""
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["train"]
    values = {
        "run": {
            "dataset": dataset,
            "target": str(target),
            "output": dataset.replace("/datasets/", "/drafters/"),
            "train": recipe | {"max_seconds": TRAIN_SECONDS},
        },
        "prompts": str(EXAMPLES / "heldout_prompts.jsonl"),
        "decode": {"max_new_tokens": HELD_OUT_TOKENS},
        "num_prompts": NUM_HELD_OUT,
    }
    return DrafterRun.model_validate(values)


@contextmanager
def serving(target: Path, project: Path, demo: Demo) -> Iterator[str]:
    """`dflash serve` on a free port, ended with this block.

    Raises:
        ServiceError: it did not come up; names its log.
    """
    log = project / ".dflash" / "logs" / "serve.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with demo.step("serve"):
        url, process = start_model_server(target, log)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
