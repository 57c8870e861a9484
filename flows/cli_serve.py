"""Command `dflash serve`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from dflash.errors import UsageError
from flows.connection import cache, project, store_credentials

LOOPBACK = "127.0.0.1"


def serve_command(
    target: Annotated[
        str | None, typer.Argument(help="Folder or hub id; by default the small target, made where it isn't there.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Checkpoint, run or export to decode with.")] = None,
    host: Annotated[
        str, typer.Option(help="Address; others than the loopback one are open to the network.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Most prompts decoded at a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Serve a target behind OpenAI's chat API until it is stopped; prints one JSON line with its URL when ready."""
    try:
        from dflash.serving.server import ServeOptions, serve
    except ImportError as error:
        raise UsageError(
            f"Serving needs torch, starlette and uvicorn: {error}. Install the extra: "
            "pip install 'dflash-pipeline[serve]'."
        ) from error
    from embedded.smollm2 import ensure_smollm2

    if target is None:
        target = str(ensure_smollm2(project() / ".dflash" / "models" / "smollm2"))

    def ready(url: str) -> None:
        sys.stdout.write(json.dumps({"url": url, "target": target, "drafter": drafter}) + "\n")
        sys.stdout.flush()

    options = ServeOptions(target, drafter, None, host, port, max_batch, device)
    serve(options, store_credentials(), cache(), ready)
