"""Run models: one field, one definition, one default.

These frozen models are the flow parameters (so the Prefect UI shows them as a form), the TOML file of
`--config`, and the options recorded in a manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RunModel(BaseModel):
    """Base of all run models: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TokenizeOptions(RunModel):
    """What decides the ids and the mask of a row; part of every shard's fingerprint."""

    max_seq_len: int = Field(
        default=8192, ge=8, le=1_048_576, description="Longest row in tokens; a longer one is cut on the right."
    )
    loss_on: Literal["last_turn", "all_turns"] = Field(
        default="last_turn",
        description="`last_turn`: the last assistant turn; `all_turns`: all of them after the last user query.",
    )
    min_loss_tokens: int = Field(
        default=2, ge=2, description="Fewest adjacent loss tokens in a row: one anchor and one token to predict."
    )


class GateThresholds(RunModel):
    """Limits of the quality gate; shares are fractions of the batch's records between 0 and 1."""

    max_single_loss_count_share: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of rows with one and the same num_loss_tokens."
    )
    tiny_mask_tokens: int = Field(
        default=8, ge=1, description="A mask with at most this many loss tokens counts as tiny."
    )
    max_tiny_mask_share: float = Field(default=0.05, ge=0, le=1, description="Largest share of tiny masks.")
    min_median_ratio: float = Field(default=0.98, ge=0, description="Lowest median of num_loss_tokens / output_tokens.")
    max_median_ratio: float = Field(
        default=1.02, ge=0, description="Highest median of num_loss_tokens / output_tokens."
    )
    ratio_tolerance: float = Field(
        default=0.02, ge=0, description="A row whose ratio is further than this from 1 counts as a mismatch."
    )
    max_ratio_mismatch_share: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of rows whose mask disagrees with output_tokens."
    )
    max_length_cut_share: float = Field(
        default=0.30, ge=0, le=1, description="Largest share of rows the server cut (finish_reason length)."
    )
    max_window_cut_share: float = Field(
        default=0.20, ge=0, le=1, description="Largest share of rows cut at max_seq_len."
    )
    max_thinking_only_share: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of rows with a trace and no answer."
    )
    max_duplicate_share: float = Field(
        default=0.01, ge=0, le=1, description="Largest share of rows whose id or ids sequence repeats another."
    )
    max_undecodable_share: float = Field(
        default=0.01, ge=0, le=1, description="Largest share of rows whose loss tokens don't decode to valid text."
    )
    max_reject_share: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of records rejected, all reasons together."
    )
    max_reject_reason_share: float = Field(
        default=0.03, ge=0, le=1, description="Largest share of records rejected for one reason."
    )
    max_damaged_files: int = Field(
        default=0,
        ge=0,
        description="Most input files that may be cut, corrupt or too large once decompressed: the rest of each is "
        "lost, however many records it held.",
    )
    max_source_shift: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Largest total variation distance of the source mix from the current version; new sources are "
        "usual, so the default only reports it.",
    )
    max_script_shift: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Largest total variation distance of the language (script) mix from the current version.",
    )
    min_rows: int = Field(default=1, ge=1, description="Fewest rows in a batch.")
    override_reason: str | None = Field(
        default=None, min_length=10, description="Publish although the gate fails; kept in the manifest."
    )


class TokenizeRun(RunModel):
    """Parameters of the flow `tokenize-completions` and of `dflash tokenize`."""

    source: str = Field(min_length=1, description="Folder of completions: s3://bucket/prefix or a local folder.")
    dataset: str = Field(min_length=1, description="Dataset root to publish: s3://bucket/prefix or a local folder.")
    tokenizer: str = Field(min_length=1, description="Folder or hub id of the target's tokenizer.")
    options: TokenizeOptions = Field(default=TokenizeOptions(), description="What decides the ids and the mask.")
    gate: GateThresholds = Field(default=GateThresholds(), description="Limits of the quality gate.")
    files_per_shard: int = Field(default=39, ge=1, le=10_000, description="Input files that make one shard.")
    files_per_download: int = Field(
        default=13, ge=1, le=1_000, description="Input files per download task: what is retried together."
    )
    download_concurrency: int = Field(default=32, ge=1, le=256, description="Downloads at a time.")
    num_workers: int = Field(default=0, ge=0, le=1_024, description="Tokenizing processes; 0 takes one for each core.")
    encoder: Literal["auto", "huggingface"] = Field(
        default="auto",
        description="`auto`: the fast encoder where it is proven to give the same ids and the batch is large enough "
        "to repay its start; `huggingface`: always the reference. The ids are the same.",
    )
    trust_remote_code: bool = Field(default=False, description="Run code that the tokenizer's repository ships.")


class ShardRun(RunModel):
    """Parameters of the flow `tokenize-shard`: the run that the shard belongs to, and which shard."""

    run: TokenizeRun = Field(description="The parameters of the run that the shard belongs to.")
    shard: str = Field(
        pattern=r"^(shard-)?\d{1,6}$", description="Shard to tokenize again, such as shard-00007 (see the run's table)."
    )

    @property
    def shard_number(self) -> int:
        """Number of the shard in its run, from 0."""
        return int(self.shard.removeprefix("shard-"))


class SliceRun(RunModel):
    """Parameters of the flow `tokenize-slice`: every n-th shard of a run."""

    run: TokenizeRun = Field(description="The parameters of the run that the shards belong to.")
    num_slices: int = Field(ge=1, le=1_000, description="Slices that the run is cut into.")
    slice_number: int = Field(ge=0, lt=1_000, description="Which of them, from 0.")

    @model_validator(mode="after")
    def _slice_exists(self) -> Self:
        if self.slice_number >= self.num_slices:
            raise ValueError(f"slice_number {self.slice_number}: expected less than num_slices, {self.num_slices}")
        return self


class SpreadRun(RunModel):
    """Parameters of the flows `tokenize-on-workers` and `tokenize-on-dask`: a run, and over how many to spread it."""

    run: TokenizeRun = Field(description="The run.")
    num_slices: int = Field(
        default=2, ge=1, le=1_000, description="Parts that run at a time: as many as there are machines."
    )
    scheduler: str | None = Field(
        default=None, description="Address of a Dask scheduler, tcp://host:8786; by default processes of this machine."
    )


class MixOptions(RunModel):
    """How many rows of a new batch are taken, and of which source; what is drawn depends on ids and seed alone."""

    max_samples: int | None = Field(default=None, ge=1, description="Most rows taken from the new batch.")
    source_caps: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={}, description="Most rows taken of a source, by its name."
    )
    source_weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default={}, description="Chance of a row by its source, relative to 1 for sources not named; needs max_samples."
    )
    seed: int = Field(default=0, description="Another seed draws other rows.")

    @model_validator(mode="after")
    def _weights_have_a_total(self) -> Self:
        if self.source_weights and self.max_samples is None:
            raise ValueError("source_weights share out max_samples: give that too, or use source_caps")
        return self

    @property
    def takes_all(self) -> bool:
        """Whether every row is taken."""
        return self.max_samples is None and not self.source_caps


class ScreenOptions(RunModel):
    """Optional looks at the new batch's content; they need the extra `dedup` only for near duplicates."""

    near_duplicates: Literal["off", "report", "drop"] = Field(
        default="off", description="Rows of the batch that nearly repeat an earlier one: count them, or drop them."
    )
    min_similarity: float = Field(
        default=0.85, gt=0, lt=1, description="Estimated Jaccard similarity from which two rows are near duplicates."
    )
    contamination: Literal["off", "report", "drop"] = Field(
        default="off", description="Rows that share a run of tokens with an evaluation prompt: count or drop them."
    )
    evaluation_prompts: str | None = Field(
        default=None, description="Folder of evaluation prompts (.jsonl with `prompt`, `question` or `messages`)."
    )
    ngram_tokens: int = Field(default=13, ge=4, le=100, description="Length of a shared run, in tokens.")

    @model_validator(mode="after")
    def _prompts_are_named(self) -> Self:
        if self.contamination != "off" and self.evaluation_prompts is None:
            raise ValueError("contamination needs evaluation_prompts: a folder of prompts to look for")
        return self


DuplicatePolicy = Literal["error", "keep_old", "keep_new"]


class MergeRun(RunModel):
    """Parameters of the flow `merge-dataset` and of `dflash merge`."""

    batch: TokenizeRun = Field(description="The new batch, the dataset it goes into, and how it is tokenized.")
    duplicates: DuplicatePolicy = Field(
        default="error",
        description="Rows whose id or ids sequence is there already: stop, keep the old row, or keep the new one.",
    )
    mix: MixOptions = Field(default=MixOptions(), description="How many rows of the batch are taken.")
    screen: ScreenOptions = Field(default=ScreenOptions(), description="Optional looks at the batch's content.")
    backup: str | None = Field(
        default=None, description="Where the current version is backed up first; <dataset>.backups by default."
    )


class RefreshRun(RunModel):
    """Parameters of the flow `refresh-dataset`: how each new batch is merged, and when one is complete."""

    merge: MergeRun = Field(
        description="How each batch is merged. Its `batch.source` is the folder that holds one folder for each batch, "
        "such as s3://bucket/completions."
    )
    quiet_s: float | None = Field(
        default=3600,
        ge=0,
        description="A batch without a _SUCCESS object is complete when nothing in it was written for so many seconds; "
        "none: only _SUCCESS counts.",
    )
    skip: tuple[str, ...] = Field(default=(), description="Names of batch folders that are left out.")
    train: str | None = Field(
        default=None,
        pattern=r"^[^/]+/[^/]+$",
        description="Deployment to start on each new version, such as train-drafter/train-drafter. It runs with its "
        "own parameters: name this dataset there and no version, and it takes the one that is current at its start.",
    )

    def merge_of(self, name: str) -> MergeRun:
        """The merge of one batch folder."""
        source = f"{self.merge.batch.source.rstrip('/')}/{name}"
        return self.merge.model_copy(update={"batch": self.merge.batch.model_copy(update={"source": source})})
