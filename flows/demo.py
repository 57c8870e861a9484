"""`dflash demo`: the whole path on real input, on servers that it starts, the way people run it in production.

The completions in `examples/completions` were written by the small target; they are put on the object store, and the
deployment `tokenize-completions` is run by a worker as from the UI. A second input, 100 real conversations with the
Qwen3.6 tokenizer, is used where the folder of shared inputs lies beside the checkout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash.config import GateThresholds, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.inspect import load_sample, render_sample
from dflash.data.tokenizer import load_tokenizer
from dflash.data.verify import verify_dataset
from dflash.errors import DamagedDatasetError
from dflash.storage import open_store
from embedded.qwen_tokenizer import ensure_qwen36_tokenizer
from embedded.smollm2 import ensure_smollm2_tokenizer
from embedded.stack import StackConnection
from flows.demo_steps import REPOSITORY, Demo, inputs_prefix, list_examples, put_files, run_deployed, start_stack
from flows.demo_training import train_on

SHARED = REPOSITORY.parent / "shared" / "data"


def run_demo(project: Path, console: Console) -> dict[str, Any]:
    """Run the demo; write `.dflash/demo.json` and return it.

    Raises:
        UsageError: the example completions are missing.
        ServiceError: a server did not start, or the deployed flow failed.
    """
    demo = Demo(project, console)
    stack = start_stack(demo)
    with demo.step("tokenizer"):
        tokenizer = ensure_smollm2_tokenizer(project / ".dflash" / "models" / "smollm2-tokenizer")
    parts = list_examples()
    with demo.step("completions to S3"):
        source = put_files(stack, "completions/examples", parts)
    run = TokenizeRun(
        source=source,
        dataset=f"s3://{stack.bucket}/{inputs_prefix('datasets/demo', parts)}",
        tokenizer=str(tokenizer),
        files_per_shard=4,
        # The small target was capped at 128 new tokens, so the server cut many of its answers.
        gate=GateThresholds(max_length_cut_share=1.0),
    )
    with demo.step("tokenize"):
        result = run_deployed(run)
    with demo.step("verify"):
        root = DatasetRoot.open(run.dataset, stack.s3, project / ".dflash" / "cache")
        verify(root)
    show_sample(demo, root, str(tokenizer))
    page = save_report(demo, result, stack)
    conversations = None
    if SHARED.is_dir():
        with demo.step("real conversations"):
            conversations = tokenize_conversations(demo, stack)
    trained = train_on(demo, stack, run.dataset)
    summary = summarize(demo, result, page, conversations) | trained
    write_summary(project, summary)
    say_where(demo, stack, summary)
    return summary


def verify(root: DatasetRoot) -> None:
    """Re-read the published version.

    Raises:
        DamagedDatasetError: something differs from the manifest.
    """
    report = verify_dataset(root, root.manifest())
    if report.problems:
        raise DamagedDatasetError(report.describe())


def show_sample(demo: Demo, root: DatasetRoot, tokenizer: str) -> None:
    """Print one sample with its loss tokens coloured."""
    sample = load_sample(root, root.manifest(), 0)
    demo.console.print(render_sample(sample, load_tokenizer(tokenizer)))


def save_report(demo: Demo, result: dict[str, Any], stack: StackConnection) -> str:
    """Copy the quality report's page to `.dflash/`; return its path."""
    folder, _, name = result["report"].rpartition("/")
    path = demo.project / ".dflash" / "demo-quality.html"
    path.write_bytes(open_store(folder, stack.s3).read(name))
    return str(path)


def tokenize_conversations(demo: Demo, stack: StackConnection) -> dict[str, Any]:
    """The second input: real conversations with reasoning and tools, in the real Qwen3.6 vocabulary."""
    template = SHARED / "qwen3.6" / "chat_template.jinja"
    tokenizer = ensure_qwen36_tokenizer(demo.project / ".dflash" / "models" / "qwen3.6-tokenizer", template)
    paths = sorted((SHARED / "reasoning_messages").glob("*.jsonl"))
    run = TokenizeRun(
        source=put_files(stack, "completions/conversations", paths),
        dataset=f"s3://{stack.bucket}/{inputs_prefix('datasets/conversations', paths)}",
        tokenizer=str(tokenizer),
        files_per_shard=1,
        # 3 of these 100 end in a server-side cut with an empty answer; small sets need looser shares.
        gate=GateThresholds(max_reject_share=0.1, max_reject_reason_share=0.1, max_single_loss_count_share=0.1),
    )
    result = run_deployed(run)
    return {name: result[name] for name in ("rows", "tokens", "loss_tokens", "manifest", "rejected")}


def summarize(demo: Demo, result: dict[str, Any], report: str, conversations: dict[str, Any] | None) -> dict[str, Any]:
    """What `demo.json` holds: the flow's result, the page here, the second input's result, the seconds of each step."""
    summary = result | {"report": report, "seconds": dict(demo.seconds)}
    return summary if conversations is None else summary | {"real_conversations": conversations}


def write_summary(project: Path, summary: dict[str, Any]) -> None:
    """Write `.dflash/demo.json`."""
    (project / ".dflash" / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")


def say_where(demo: Demo, stack: StackConnection, summary: dict[str, Any]) -> None:
    """Print what to open next."""
    ui = stack.prefect_api_url.removesuffix("/api")
    demo.console.print(
        f"[bold]{summary['rows']:,} rows, {summary['tokens']:,} tokens, {summary['loss_tokens']:,} loss tokens[/bold] "
        f"in {summary['dataset']} ({summary['manifest']})\n"
        f"Prefect UI      {ui}\nThis run        {summary['flow_run_url']}\nQuality report  {summary['report']}\n"
        f"Numbers         {demo.project / '.dflash' / 'demo.json'}\nStop it all     dflash down"
    )
