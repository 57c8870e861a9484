"""Run models that span training, evaluation and export; read on machines without torch."""

from __future__ import annotations

from pydantic import Field

from dflash.config import RunModel
from dflash.eval.config import DecodeConfig, EvaluateRun, ExportRun
from dflash.model.layout import ExportFormat
from dflash.storage import join_uri
from dflash.train.run import TrainRun

EXPORTS, RELEASED = "exports", "released.json"
# On which an export's files are decoded beside the checkpoint: they show a fault of rounding, and cost little.
REMEASURED_PROMPTS = 2


class DrafterRun(RunModel):
    """Parameters of the flow `train-drafter`: a training, its evaluation, a gate, an export."""

    run: TrainRun = Field(
        description="The training. Its `output` is the folder of all drafters: each dataset version trains in a folder "
        "of its own below."
    )
    prompts: str = Field(
        min_length=1, description="Held-out prompts: a JSON Lines file, or a folder of them; local or s3://."
    )
    decode: DecodeConfig = Field(default=DecodeConfig(), description="How they are decoded.")
    num_prompts: int | None = Field(
        default=None, ge=1, description="Most prompts, taken in turn from each source; all by default."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id; the target's own by default.")
    min_tau: float | None = Field(default=None, ge=1, description="A lower held-out tau is not released.")
    previous: str | None = Field(
        default=None,
        description="Drafter that the new one must not fall behind: checkpoint, run or export. By default the one that "
        "this flow released last.",
    )
    max_tau_drop: float = Field(default=0.02, ge=0, description="How far tau may fall below the previous drafter's.")
    export_format: ExportFormat | None = Field(
        default="sglang", description="Layout of the export (sglang and vllm load the same); none exports nothing."
    )

    def training(self, manifest: str) -> TrainRun:
        """The training on one dataset version, in a folder of its own."""
        return self.run.model_copy(update={"version": manifest, "output": join_uri(self.run.output, manifest)})

    def evaluation(self, checkpoint: str, manifest: str, *, compare: bool = True) -> EvaluateRun:
        """The evaluation of a checkpoint on the held-out prompts; without a limit, since the gate is the caller's."""
        return EvaluateRun(
            checkpoint=checkpoint,
            target=self.run.target,
            prompts=self.prompts,
            dataset=self.run.dataset,
            dataset_version=manifest,
            tokenizer=self.tokenizer,
            decode=self.decode,
            limit=self.num_prompts,
            compare=compare,
            device=self.run.device,
            dtype=self.run.dtype,
            trust_remote_code=self.run.trust_remote_code,
        )

    def export(self, checkpoint: str, manifest: str, weights_sha256: str) -> ExportRun | None:
        """The export of a checkpoint, in a folder named after its weights; None where none is wanted."""
        if self.export_format is None:
            return None
        return ExportRun(
            checkpoint=checkpoint,
            output=join_uri(self.run.output, manifest, EXPORTS, f"{weights_sha256[:16]}-{self.export_format}"),
            format=self.export_format,
            target=self.run.target,
            prompts=self.prompts,
            num_prompts=REMEASURED_PROMPTS,
            trust_remote_code=self.run.trust_remote_code,
        )
