"""Commands on dataset versions: merge a batch, adopt a saved dataset, list versions, compare two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash.config import MergeRun, TokenizeOptions
from dflash.data.quality_report import printable
from flows.cli_data import ConfigFile, DatasetArgument, JsonFlag, Settings, print_result, progress_bar, quiet_prefect
from flows.connection import cache, orchestrator, store_credentials
from flows.parameters import load_parameters

MAX_MIX_ROWS = 20  # sources in a printed comparison; --json has all


def merge_command(  # noqa: PLR0913, PLR0917 (the options of a command)
    config: ConfigFile = None,
    setting: Settings = None,
    source: Annotated[str | None, typer.Option(help="Folder of the new completions.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset root to merge into.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of the target's tokenizer.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Most rows taken from the new batch.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokenize a new batch, judge it, back up the current version, and publish both together."""
    named = {"source": source, "dataset": dataset, "tokenizer": tokenizer}
    by_name = [f"batch.{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    if max_samples is not None:
        by_name.append(f"mix.max_samples={max_samples}")
    run = load_parameters(MergeRun, config, [*(setting or []), *by_name], {})
    with orchestrator():
        from flows.merge_dataset import merge_dataset
        from flows.progress import listener

        quiet_prefect()
        with progress_bar() as show:
            token = listener.set(show)
            try:
                result = merge_dataset(run)
            finally:
                listener.reset(token)
    print_result(result, as_json=as_json)


def adopt_command(
    folder: Annotated[str, typer.Argument(help="Folder that save_to_disk wrote: s3://... or local.")],
    dataset: Annotated[str, typer.Option(help="Dataset root that it becomes version 1 of; may be the same folder.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or hub id of the tokenizer that made its ids.")],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="An option that it was tokenized with: max_seq_len=4096.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an existing saved dataset version 1, without tokenizing it again; every row is checked."""
    from dflash.data.adopt import Adoption, adopt_dataset
    from dflash.data.dataset import DatasetRoot
    from dflash.data.tokenizer import load_tokenizer
    from dflash.manifest import TokenizerRecord
    from dflash.storage import open_store

    options = load_parameters(TokenizeOptions, None, setting or [], {})
    credentials = store_credentials()
    root = DatasetRoot.open(dataset, credentials, cache())
    loaded = load_tokenizer(tokenizer)
    record = TokenizerRecord(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        template_fingerprint=loaded.template_fingerprint,
        vocab_size=loaded.vocab_size,
    )
    with progress_bar() as show:
        job = Adoption(open_store(folder, credentials), root, record, options)
        manifest = adopt_dataset(job, _work(), lambda done, total: show(_Files(done, total)))
    counts = manifest.counts.model_dump()
    print_result({"dataset": root.uri, "manifest": manifest.name, **counts, **manifest.notes}, as_json=as_json)


def versions_command(dataset: DatasetArgument, as_json: JsonFlag = False) -> None:
    """List the published versions of a dataset."""
    from dflash.data.dataset import DatasetRoot
    from dflash.data.versions import list_versions

    lines = list_versions(DatasetRoot.open(dataset, store_credentials(), cache()))
    if as_json:
        print_result({"dataset": dataset, "versions": [asdict(line) for line in lines]}, as_json=True)
        return
    table = Table("", "version", "date", "action", "rows", "tokens", "loss tokens", "shards", "bytes", "added")
    for line in lines:
        numbers = (line.num_rows, line.num_tokens, line.num_loss_tokens, line.num_shards, line.num_bytes)
        mark, added = "*" if line.is_current else "", line.sources[-1] if line.sources else ""
        cells = (mark, line.name, line.at, line.action, *(f"{number:,}" for number in numbers), printable(added))
        table.add_row(*map(Text, cells))
    Console().print(table)


def diff_command(
    first: Annotated[str, typer.Argument(help="Version: number or name.")],
    second: Annotated[str, typer.Argument(help="The other version.")],
    dataset: Annotated[str, typer.Option(help="Dataset root.")],
    as_json: JsonFlag = False,
) -> None:
    """Show two versions side by side: counts, mix, lengths, loss tokens."""
    from dflash.data.dataset import DatasetRoot
    from dflash.data.versions import diff_versions

    diff = diff_versions(DatasetRoot.open(dataset, store_credentials(), cache()), first, second)
    if as_json:
        print_result(diff.to_json(), as_json=True)
        return
    for table in _diff_tables(diff.to_json()):
        Console().print(table)


class _Files:
    """Files done, in the shape that the progress bar shows."""

    step = "adopting"

    def __init__(self, done: int, total: int) -> None:
        self.percent = 100.0 * done / total
        self._line = f"{self.step}: {done}/{total} files"

    def describe(self) -> str:
        """One line for a person."""
        return self._line


def _diff_tables(diff: Mapping[str, Any]) -> Iterator[Table]:
    pair = (diff["first"], diff["second"])
    names = [entry["name"] for entry in pair]
    yield _side_by_side("counts", names, [entry["counts"] for entry in pair])
    shards = Table("shards in both", "only in the first", "only in the second")
    shards.add_row(*(f"{diff[name]:,}" for name in ("shared_shards", "only_first", "only_second")))
    yield shards
    if diff["settings"]:
        settings = Table("setting", *names)
        for row in diff["settings"]:
            settings.add_row(*map(Text, row))
        yield settings
    for kind in ("sources", "scripts"):
        yield _side_by_side(kind, names, [entry["mix"][kind] for entry in pair], limit=MAX_MIX_ROWS)
    for kind in ("lengths", "loss_tokens"):
        bins = [
            {f"{edge:,} tokens and more": count for edge, count in zip(diff["edges"], entry[kind], strict=True)}
            for entry in pair
        ]
        yield _side_by_side(kind.replace("_", " "), names, bins, in_order=True)


def _side_by_side(
    title: str, names: list[str], pair: list[dict[str, int]], *, limit: int | None = None, in_order: bool = False
) -> Table:
    """Rows with a number on either side, the difference, and a bar of each one's share."""
    first, second = pair
    table = Table(title, names[0], names[1], "difference", title_justify="left")
    keys = list(dict.fromkeys((*first, *second)))
    keys = [key for key in keys if first.get(key) or second.get(key)]
    if not in_order and limit is not None:
        keys.sort(key=lambda key: -max(first.get(key, 0), second.get(key, 0)))
    totals = [max(1, sum(side.values())) for side in pair] if in_order or limit is not None else None
    for key in keys[:limit]:
        numbers = [side.get(key, 0) for side in pair]
        cells = [f"{number:,}" for number in numbers]
        if totals is not None:
            shares = [number / total for number, total in zip(numbers, totals, strict=True)]
            cells = [
                f"{cell} {share:6.1%} {'█' * round(share * 20)}" for cell, share in zip(cells, shares, strict=True)
            ]
        table.add_row(*map(Text, (printable(key) or "(none)", *cells, f"{numbers[1] - numbers[0]:+,}")))
    if limit is not None and len(keys) > limit:
        table.add_row(f"and {len(keys) - limit} more", "", "", "")
    return table


def _work() -> Path:
    """Folder of downloads and rewritten shards."""
    return cache().parent / "work"
