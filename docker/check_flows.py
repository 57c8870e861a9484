"""Imports each flow that the deployments file sends to one pool: what an image lacks shows before a worker runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import yaml


def main(file: str, pool: str) -> None:
    """Import the flows of a pool, and print their deployments."""
    for item in yaml.safe_load(Path(file).read_text())["deployments"]:
        if item["work_pool"]["name"] == pool:
            module, _, flow = item["entrypoint"].rpartition(".")
            getattr(importlib.import_module(module), flow)
            sys.stdout.write(f"{item['name']}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
