"""Flow `export-drafter`: a checkpoint in the layout that servers load; runs where torch is."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from dflash.eval.config import EXPORT_CONFIG, ExportRun
from dflash.storage import open_store
from flows.run_names import named_after
from tasks.settings import log_to_run, s3_credentials, settings


@flow(
    name="export-drafter", flow_run_name=named_after("export", "output"), persist_result=True, result_serializer="json"
)
def export_drafter(config: ExportRun) -> dict[str, Any]:
    """Write a checkpoint in a layout that servers load, read back and compared; an export that is whole stays.

    Args:
        config: checkpoint, output, layout.

    Returns:
        Where it lies, its files, tau.
    """
    log_to_run()
    store = open_store(config.output, s3_credentials())
    if any(info.key == EXPORT_CONFIG for info in store.list()):
        get_run_logger().info("%s is there and whole: nothing to do", store.uri)
        return {"output": store.uri, "format": config.format}
    from dflash.eval.export_job import export_run

    return export_run(config, s3_credentials(), settings().cache).to_json()
