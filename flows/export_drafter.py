"""Flow `export-drafter`: a checkpoint in the layout that servers load; runs where torch is."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run as runtime

from dflash.eval.config import ExportRun
from dflash.storage import open_store
from tasks.settings import log_to_run, s3_credentials, settings

LAST_WRITTEN = "config.json"


def run_name() -> str:
    """Name of a flow run: what it writes."""
    config = runtime.parameters["config"]
    output = config.output if isinstance(config, ExportRun) else config["output"]
    return f"export-{PurePosixPath(output.rstrip('/')).name}"


@flow(name="export-drafter", flow_run_name=run_name, persist_result=True, result_serializer="json")
def export_drafter(config: ExportRun) -> dict[str, Any]:
    """Write a checkpoint in a layout that servers load, read back and compared; an export that is whole stays.

    Args:
        config: checkpoint, output, layout.

    Returns:
        Where it lies, its files, tau.
    """
    log_to_run()
    store = open_store(config.output, s3_credentials())
    if any(info.key == LAST_WRITTEN for info in store.list()):
        get_run_logger().info("%s is there and whole: nothing to do", store.uri)
        return {"output": store.uri, "format": config.format}
    from dflash.eval.export_job import export_run

    return export_run(config, s3_credentials(), settings().cache).to_json()
