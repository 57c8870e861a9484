"""Commands that keep versions safe: back up, restore, roll back, collect garbage."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash.data.quality_report import printable
from flows.cli_data import DatasetArgument, JsonFlag, print_result, progress_bar
from flows.connection import cache, store_credentials

BackupOption = Annotated[
    str | None, typer.Option("--backup", help="Where the backup lies; <dataset>.backups by default.")
]
CheckFlag = Annotated[
    bool, typer.Option("--check", help="Read what is there already through and compare digests, not sizes alone.")
]
MAX_ROWS = 40  # objects in a printed plan; --json has all


def backup_command(
    dataset: DatasetArgument,
    backup: BackupOption = None,
    version: Annotated[str | None, typer.Option(help="Version; the current one by default.")] = None,
    check: CheckFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Copy a version into the backup; only shards that it lacks are copied, each is verified."""
    from dflash.data.backup import backup_version

    root, mirror = _open(dataset, backup)
    with progress_bar() as show:
        record = backup_version(root, root.manifest(version), mirror, _progress(show, "backing up"), check=check)
    print_result(record.to_json(), as_json=as_json)


def restore_command(
    dataset: DatasetArgument,
    backup: BackupOption = None,
    to: Annotated[
        str | None, typer.Option(help="Version; by default the current one, or the newest backup if none is known.")
    ] = None,
    check: CheckFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a lost or damaged dataset whole from its backup; also into another root, with --backup."""
    from dflash.data.restore import restore_version

    root, mirror = _open(dataset, backup)
    with progress_bar() as show:
        record = restore_version(mirror, root, to, _progress(show, "restoring"), check=check)
    print_result(record.to_json(), as_json=as_json)


def rollback_command(
    dataset: DatasetArgument,
    to: Annotated[str, typer.Option(help="Version that becomes current again: number or name.")],
    backup: BackupOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an earlier version current again by one swap of the pointer."""
    from dflash.data.backup import rollback

    root, mirror = _open(dataset, backup)
    with progress_bar() as show:
        manifest = rollback(root, to, mirror, _progress(show, "fetching"))
    result = {"dataset": root.uri, "version": manifest.version, "manifest": manifest.name}
    print_result({**result, **manifest.counts.model_dump()}, as_json=as_json)


def gc_command(
    dataset: DatasetArgument,
    backup: BackupOption = None,
    keep: Annotated[int, typer.Option(help="Versions whose shards stay in place, the current one included.")] = 1,
    min_age_hours: Annotated[float, typer.Option(help="What is younger stays.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go and why.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Move shards of replaced versions to the backup, and remove what no version and no backup names."""
    from dflash.data.collect import CollectRules, collect_garbage, plan_collection

    root, mirror = _open(dataset, backup)
    rules = CollectRules(keep, min_age_hours)
    if dry_run:
        result = plan_collection(root, mirror, rules).to_json()
    else:
        with progress_bar() as show:
            result = collect_garbage(root, mirror, rules, _progress(show, "moving")).to_json()
    result["dry_run"] = dry_run
    if as_json:
        print_result(result, as_json=True)
    else:
        _print_collection(result)


def _open(dataset: str, backup: str | None) -> tuple[Any, Any]:
    from dflash.data.backup import open_mirror
    from dflash.data.dataset import DatasetRoot

    credentials = store_credentials()
    root = DatasetRoot.open(dataset, credentials, cache())
    return root, open_mirror(root, backup, credentials)


class _Shards:
    """Shards done, in the shape that the progress bar shows."""

    def __init__(self, step: str, done: int, total: int) -> None:
        self.step = step
        self.percent = 100.0 * done / total
        self._line = f"{step}: {done}/{total} shards"

    def describe(self) -> str:
        """One line for a person."""
        return self._line


def _progress(show: Any, step: str) -> Any:
    return lambda done, total: show(_Shards(step, done, total))


def _print_collection(result: dict[str, Any]) -> None:
    gone = [("move" if kind == "moved" else "remove", item) for kind in ("moved", "removed") for item in result[kind]]
    table = Table("", "object", "bytes", "why")
    for action, item in gone[:MAX_ROWS]:
        table.add_row(*map(Text, (action, printable(item["key"]), f"{item['num_bytes']:,}", item["reason"])))
    if len(gone) > MAX_ROWS:
        table.add_row("", f"and {len(gone) - MAX_ROWS} more", "", "")
    if gone:
        Console().print(table)
    done = "would be" if result["dry_run"] else "were"
    sys.stdout.write(
        f"{result['current']} is current, in place stay {', '.join(result['kept'])}. "
        f"{len(result['moved'])} shards ({result['moved_bytes']:,} bytes) {done} moved to the backup, "
        f"{len(result['removed'])} objects ({result['removed_bytes']:,} bytes) {done} removed. Unfinished uploads: "
        f"{len(result['uploads_aborted'])} {done} aborted, {len(result['uploads_noticed'])} noticed.\n"
    )
