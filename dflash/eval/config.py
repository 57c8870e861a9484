"""Run models of evaluation and export; read on machines without torch."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from dflash.config import RunModel
from dflash.model.layout import ExportFormat

# Written last: an export with it is whole.
EXPORT_CONFIG: Final = "config.json"


class DecodeConfig(RunModel):
    """When and how prompts are decoded."""

    max_new_tokens: int = Field(default=128, ge=2, le=131_072, description="Most new tokens of a prompt.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy, and then the ids must be the target's own.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Smallest set of likeliest ids with this probability.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of the sampling.")
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="What the template gets, such as enable_thinking, where a record doesn't say."
    )


class EvaluateRun(RunModel):
    """Parameters of the flow `evaluate-drafter` and of `dflash evaluate`."""

    checkpoint: str = Field(
        min_length=1,
        description="Folder or s3:// prefix of a checkpoint, of a run (its newest checkpoint), or of an export.",
    )
    target: str | None = Field(
        default=None, description="Folder or hub id of the target; by default the one that the checkpoint names."
    )
    prompts: str = Field(
        min_length=1, description="JSON Lines file, or a folder of them, with `messages`; local or s3://."
    )
    dataset: str | None = Field(
        default=None,
        description="Dataset root of the training: prompts that occur in it are refused. By default the one that the "
        "checkpoint names, if it can be reached.",
    )
    dataset_version: str | None = Field(
        default=None, description="Version of `dataset`; the current one by default, or the one that was trained on."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id; the target's own by default.")
    decode: DecodeConfig = Field(default=DecodeConfig(), description="Limits and sampling.")
    limit: int | None = Field(default=None, ge=1, description="Most prompts, taken in turn from each source.")
    compare: bool = Field(default=True, description="Also decode with the target alone: losslessness and speed-up.")
    min_tau: float | None = Field(default=None, ge=1, description="A lower overall tau is a failed gate.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where target and drafter run.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of target and drafter; auto is float32 on a CPU and bfloat16 on CUDA."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that the target's repository ships.")


class ExportRun(RunModel):
    """Parameters of `dflash export`."""

    checkpoint: str = Field(min_length=1, description="Folder or s3:// prefix of a checkpoint, or of a run.")
    output: str = Field(min_length=1, description="New folder or s3:// prefix for the exported drafter.")
    format: ExportFormat = Field(description="Servers of the official layout, or the speculators library.")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Of the weights in the file.")
    target: str | None = Field(
        default=None, description="The target; by default the one it was evaluated with. Needed to decode again."
    )
    without_evaluation: bool = Field(default=False, description="Export although nobody measured this drafter.")
    prompts: str | None = Field(default=None, description="Prompts on which tau is measured before and after.")
    num_prompts: int = Field(default=4, ge=1, description="How many of them.")
    trust_remote_code: bool = Field(default=False, description="Run code that the target's repository ships.")
