"""The command `dflash`: thin commands over flows and library; exit codes 0, 1, 2, 3 (gate), 4 (lost a race)."""

from __future__ import annotations

import sys

import typer

from dflash.errors import DflashError
from flows.cli_backup import backup_command, gc_command, restore_command, rollback_command
from flows.cli_data import inspect_command, tokenize_command, verify_command
from flows.cli_demo import demo_command
from flows.cli_evaluate import evaluate_command, export_command
from flows.cli_generate import generate_command, regenerate_command, spot_check_command
from flows.cli_plan import doctor_command, plan_command
from flows.cli_serve import serve_command
from flows.cli_stack import down, status, up
from flows.cli_train import train_command
from flows.cli_versions import adopt_command, diff_command, merge_command, versions_command

app = typer.Typer(
    name="dflash",
    help="From raw LLM completions on S3 to a DFlash speculative-decoding drafter in production.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up)
app.command("down")(down)
app.command("status")(status)
app.command("demo")(demo_command)
app.command("generate")(generate_command)
app.command("regenerate")(regenerate_command)
app.command("spot-check")(spot_check_command)
app.command("serve")(serve_command)
app.command("tokenize")(tokenize_command)
app.command("merge")(merge_command)
app.command("adopt")(adopt_command)
app.command("versions")(versions_command)
app.command("diff")(diff_command)
app.command("backup")(backup_command)
app.command("restore")(restore_command)
app.command("rollback")(rollback_command)
app.command("gc")(gc_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("export")(export_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """Run the command line; errors of ours become one message and their exit code."""
    try:
        app()
    except DflashError as error:
        sys.stderr.write(f"dflash: {error}\n")
        sys.exit(error.exit_code)
