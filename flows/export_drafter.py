"""Flow `export-drafter`: a checkpoint in the layout that servers load; runs where torch is."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from dflash.eval.config import ExportRun
from dflash.storage import open_store
from flows.run_names import named_after
from tasks.settings import log_to_run, s3_credentials, settings


@flow(
    name="export-drafter", flow_run_name=named_after("export", "output"), persist_result=True, result_serializer="json"
)
def export_drafter(config: ExportRun) -> dict[str, Any]:
    """Write a checkpoint in a layout that servers load, read back and compared; one that is there, whole, stays.

    Args:
        config: checkpoint, output, layout.

    Returns:
        Where it lies, its files, tau.

    Raises:
        ModelError: the output holds another export, or something else.
    """
    log_to_run()
    from dflash.eval.export_job import export_run, is_exported

    if is_exported(config, s3_credentials()):
        get_run_logger().info("%s holds this export, whole: nothing to do", config.output)
        return {"output": open_store(config.output, s3_credentials()).uri, "format": config.format}
    return export_run(config, s3_credentials(), settings().cache).to_json()
