"""Run models of generation: the form in the UI, the TOML file of `--config`, and what records keep."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from dflash.config import RunModel
from dflash.data.strict_json import check_value
from dflash.errors import RecordError
from dflash.validation import check_address

MOST_TOKENS: Final = 1_048_576  # of one completion


class SamplingOptions(RunModel):
    """How the target samples; a prompt may override each field."""

    temperature: float = Field(default=1.0, ge=0, le=5, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Probability mass that is sampled from.")
    top_k: int | None = Field(default=None, ge=1, description="Likeliest tokens that are sampled from; none: all.")
    max_tokens: int = Field(default=8192, ge=1, le=MOST_TOKENS, description="Most tokens of one completion.")
    seed: int | None = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="With the prompt's id it gives the seed of each request; none: the server's own chance.",
    )


class GenerateRun(RunModel):
    """Parameters of the flow `generate-completions` and of `dflash generate`."""

    prompts: str = Field(
        min_length=1,
        description="A .jsonl file or a folder of them (s3://... or local), or datasets:NAME or datasets:NAME:SPLIT.",
    )
    batch: str = Field(min_length=1, description="Folder of the new batch: s3://bucket/completions/NAME or local.")
    endpoints: tuple[str, ...] = Field(
        min_length=1, description="Base URLs of OpenAI-compatible servers, such as http://host:8000/v1."
    )
    model: str | None = Field(default=None, description="The model's name there; by default the only one it serves.")
    api: Literal["openai", "sglang"] = Field(
        default="openai",
        description="`openai`: /chat/completions, with token ids where the server gives them (vLLM); `sglang`: the "
        "native /generate, which takes and gives token ids and needs `tokenizer`.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="The target's tokenizer. `sglang` needs it; else it tells whether the target "
        "thinks where `thinking` isn't set, so that cut thinking is recognised behind servers without a parser.",
    )
    sampling: SamplingOptions = Field(default=SamplingOptions(), description="How the target samples.")
    thinking: bool | None = Field(
        default=None, description="Passed to the chat template as enable_thinking; none: the template's default."
    )
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="More that the chat template gets.")
    tools: tuple[dict[str, Any], ...] = Field(default=(), description="Tools of prompts that bring none of their own.")
    strip_answers: bool = Field(
        default=False, description="Leave out the last assistant turn of prompts that are whole conversations."
    )
    part_records: int = Field(default=500, ge=1, le=100_000, description="Records in one file of the batch.")
    max_in_flight: int = Field(
        default=256, ge=1, le=4096, description="Most requests in flight, all endpoints together."
    )
    request_timeout_s: float = Field(default=1800, gt=0, description="Longest wait for one answer.")
    max_attempts: int = Field(default=8, ge=1, le=100, description="Tries of one prompt.")
    max_outage_s: float = Field(
        default=600, gt=0, description="The run stops when no endpoint has answered for so long; a rerun goes on."
    )
    max_failed_share: float = Field(
        default=0.001, ge=0, le=1, description="The batch counts as complete with at most this share of prompts failed."
    )
    only_failed: bool = Field(default=False, description="Only the prompts that failed in the run before.")

    @field_validator("endpoints")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_address(url).rstrip("/") for url in urls))

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        from dflash.data.chat import RESERVED_KWARGS  # brings transformers, which takes seconds

        if reserved := RESERVED_KWARGS.intersection(kwargs):
            raise ValueError(f"{', '.join(sorted(reserved))} can't be passed: rendering itself sets them")
        return kwargs

    @field_validator("chat_template_kwargs", "tools")
    @classmethod
    def _json_alone(cls, value: Any) -> Any:
        """TOML has dates and infinities, which no request can hold."""
        try:
            check_value(list(value) if isinstance(value, tuple) else value, "it")
        except RecordError as error:
            raise ValueError(error.message) from None
        return value

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What every request passes to the chat template."""
        from dflash.data.chat import THINKING_FLAG

        thinking = {} if self.thinking is None else {THINKING_FLAG: self.thinking}
        return {**self.chat_template_kwargs, **thinking}


Finding = Literal["empty", "few_tokens", "length", "rejected"]


class RegenerateRun(RunModel):
    """Parameters of the flow `regenerate-completions` and of `dflash regenerate`."""

    source: str = Field(min_length=1, description="What is looked through: a batch folder or a dataset root.")
    version: str | None = Field(default=None, description="Version of the dataset; the current one by default.")
    findings: tuple[Finding, ...] = Field(
        default=("empty", "few_tokens", "length", "rejected"), min_length=1, description="What is generated anew."
    )
    few_tokens: int = Field(default=6, ge=1, description="A record with at most so many loss tokens has too few.")
    cut_max_tokens: int | None = Field(
        default=None,
        ge=2,
        description="max_tokens of records that were cut; by default four times generate.sampling's.",
    )
    generate: GenerateRun = Field(description="How; its `prompts` is replaced by what was found.")
