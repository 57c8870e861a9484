"""Parameters of a training run; read on machines without torch."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from dflash.config import RunModel
from dflash.train.config import TrainConfig
from dflash.train.target_shape import TargetNumbers

# Beside the checkpoints: how a run ended.
RESULT: Final = "result.json"


class TrainRun(RunModel):
    """Parameters of the flow `train-online` and of `dflash train`."""

    dataset: str = Field(min_length=1, description="Dataset root: s3://bucket/prefix or a local folder.")
    version: str | None = Field(
        default=None, description="Version by number or name; the one that is current when the run starts by default."
    )
    target: str = Field(min_length=1, description="Folder or hub id of the target: config.json and weights.")
    target_shape: TargetNumbers | None = Field(
        default=None, description="The target's sizes for `dflash plan` on machines without its config.json."
    )
    output: str = Field(
        min_length=1,
        description="Run folder for checkpoints and metrics: s3://bucket/prefix or a local folder. The same run, "
        "started again, goes on from the newest checkpoint there.",
    )
    train: TrainConfig = Field(default=TrainConfig(), description="The training itself.")
    num_processes: int = Field(default=1, ge=1, le=1024, description="Ranks on this machine, one for each GPU.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="`auto` takes CUDA where there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the target; `auto` is float32 on a CPU and bfloat16 on CUDA."
    )
    shard_cache_bytes: int = Field(
        default=20_000_000_000, ge=0, description="Disk for shards of a dataset on S3; the oldest are removed first."
    )
    stop_grace_s: float = Field(
        default=600.0, gt=0, description="Time that a stopped run gets to save its checkpoint before it is killed."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that the target's repository ships.")

    @model_validator(mode="after")
    def _enough_ranks(self) -> Self:
        needed = self.train.topology.num_ranks
        if needed is not None and self.num_processes != needed:
            raise ValueError(
                f"num_processes is {self.num_processes}, but train.topology needs {needed}: "
                f"{self.train.topology.target_ranks} target and {self.train.topology.drafter_ranks} drafter ranks"
            )
        return self
