"""Flow `train-drafter`: from a dataset version to a released drafter, each step where it belongs.

Runs on the pool `cpu` and needs no torch: training, evaluation and export are runs of their own deployments on the pool
with the GPUs. A drafter is released by one replacement of `<output>/released.json`, after its held-out tau was held
against the one that is released now.
"""

from __future__ import annotations

import json
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run as runtime

from dflash.config import RunModel
from dflash.errors import DatasetError, GateError, ObjectNotFoundError
from dflash.eval.config import EvaluateRun, ExportRun
from dflash.manifest import canonical_json
from dflash.runs import RELEASED, DrafterRun
from dflash.storage import ObjectInfo, open_store
from flows.run_names import named_after
from tasks.children import run_child
from tasks.outcomes import Evaluated, read_export, read_measured, read_training
from tasks.settings import log_to_run, s3_credentials
from tasks.training import check_training, resolve_version

TRAIN, EVALUATE, EXPORT = (
    "train-online/train-online",
    "evaluate-drafter/evaluate-drafter",
    "export-drafter/export-drafter",
)


@flow(
    name="train-drafter",
    flow_run_name=named_after("drafter", "run", "output"),
    persist_result=True,
    result_serializer="json",
)
def train_drafter(config: DrafterRun) -> dict[str, Any]:
    """Train a drafter on a dataset version, measure it on held-out prompts, and release it if it holds.

    Retry it after a failure: a training that runs is waited for, what is done stays done.

    Args:
        config: the training, the prompts, the gate, the layout of the export.

    Returns:
        Version, checkpoint, tau, the previous drafter's tau, the export.

    Raises:
        GateError: tau is below `min_tau`, or fell by more than `max_tau_drop`; nothing is exported or released.
    """
    log_to_run()
    log = get_run_logger()
    manifest = resolve_version(config.run.dataset, config.run.version)
    training = config.training(manifest)
    log.info("data, target and drafter fit each other: %s", check_training(training))
    _run_child(TRAIN, training, "train")
    trained = read_training(training)
    checkpoint = trained["checkpoint"]
    log.info("trained to step %d: %s", trained["step"], checkpoint)
    evaluated = _evaluate(config.evaluation(checkpoint, manifest), "evaluate")
    info, released = _released(config)
    previous = _previous_tau(config, released, manifest, evaluated)
    result = {
        "dataset": config.run.dataset,
        "manifest": manifest,
        "step": trained["step"],
        "checkpoint": checkpoint,
        "weights_sha256": evaluated.weights_sha256,
        "tau": evaluated.tau,
        "evaluation": evaluated.uri,
        "previous": previous,
    }
    enforce(config, result)
    export = config.export(checkpoint, manifest, evaluated.weights_sha256)
    result["export"] = None if export is None else _export(export)
    _release(config, info, result)
    create_markdown_artifact(render(result), key="drafter")
    return result


def enforce(config: DrafterRun, result: dict[str, Any]) -> None:
    """Hold the new drafter's tau against the limit and the previous drafter.

    Raises:
        GateError: it is lower.
    """
    tau, previous = result["tau"], result["previous"]
    if config.min_tau is not None and tau < config.min_tau:
        raise GateError(
            f"Held-out tau is {tau:.3f}, the limit min_tau is {config.min_tau:g}: {result['checkpoint']} was not "
            f"released. The numbers are in {result['evaluation']}. Train longer or on more data, or lower min_tau."
        )
    if previous is not None and tau < previous["tau"] - config.max_tau_drop:
        raise GateError(
            f"Held-out tau is {tau:.3f}, that of the previous drafter {previous['checkpoint']} is "
            f"{previous['tau']:.3f} on the same prompts, and at most {config.max_tau_drop:g} may be lost: "
            f"{result['checkpoint']} was not released. The numbers are in {result['evaluation']}. Train longer, look "
            "at the mix of the data, or raise max_tau_drop."
        )


def previous_drafter(named: str | None, released: dict[str, Any], weights_sha256: str) -> str | None:
    """Where the drafter lies that a new one is held against; None where that is the new one itself, or none.

    Args:
        named: by the run.
        released: content of `released.json`; its export is taken, since a training that goes on removes checkpoints.
        weights_sha256: of the new one.
    """
    if named is not None or released.get("weights_sha256") == weights_sha256:
        return named
    return released.get("export") or released.get("checkpoint")


def render(result: dict[str, Any]) -> str:
    """The outcome as Markdown."""
    previous = result["previous"]
    rows = [
        ("dataset version", result["manifest"]),
        ("step", f"{result['step']:,}"),
        ("held-out tau", f"{result['tau']:.3f}"),
        ("tau of the previous drafter", "none" if previous is None else f"{previous['tau']:.3f}"),
        ("checkpoint", result["checkpoint"]),
        ("export", result["export"] or "none"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _run_child(deployment: str, config: RunModel, key: str) -> None:
    run_child(deployment, config.model_dump(mode="json"), key, str(runtime.id), runtime.run_count)


def _evaluate(run: EvaluateRun, key: str) -> Evaluated:
    _run_child(EVALUATE, run, key)
    return read_measured(run)


def _export(run: ExportRun) -> str:
    _run_child(EXPORT, run, "export")
    return read_export(run)


def _previous_tau(
    config: DrafterRun, released: dict[str, Any] | None, manifest: str, evaluated: Evaluated
) -> dict[str, Any] | None:
    """Measure the previous drafter on the same prompts; None where there is none, or where it is this very one."""
    place = previous_drafter(config.previous, released or {}, evaluated.weights_sha256)
    if place is None:
        return None
    measured = _evaluate(config.evaluation(place, manifest, compare=False), "evaluate-previous")
    return {"checkpoint": place, "tau": measured.tau}


def _released(config: DrafterRun) -> tuple[ObjectInfo | None, dict[str, Any] | None]:
    store = open_store(config.run.output, s3_credentials())
    try:
        info = store.head(RELEASED)
        content = json.loads(store.read(RELEASED, expect=info))
    except ObjectNotFoundError:
        return None, None
    except ValueError as error:
        raise DatasetError(f"{store.uri}/{RELEASED} is not JSON: {error}. Remove it, or name `previous`.") from error
    return info, content if isinstance(content, dict) else None


def _release(config: DrafterRun, info: ObjectInfo | None, result: dict[str, Any]) -> None:
    """Make the drafter the released one, unless another run released one meanwhile."""
    store = open_store(config.run.output, s3_credentials())
    store.replace(RELEASED, canonical_json(result), if_match=None if info is None else info.etag)
