"""Requests: what is asked for a prompt, in the words of each kind of server, and what its reply says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from dflash.data.chat import THINKING_FLAG
from dflash.data.messages import OPEN_TAG
from dflash.data.prompting import prompt_token_ids
from dflash.data.tokenizer import TargetTokenizer
from dflash.generate.config import GenerateRun, SamplingOptions
from dflash.generate.prompts import Prompt

_TAG_TOKENS = 16  # more than any vocabulary needs for an opening tag and the white space behind it


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with everything that decides its answer.

    Attributes:
        prompt: what is asked.
        model: the name that the server knows.
        sampling: with the prompt's own fields.
        seed: of this request; None where the run sets none.
        kwargs: what the chat template gets.
        tools: of the prompt, else of the run.
        hash: hex digest of all that decides the answer; the same for every try.
        thinks_by_default: whether the template opens a thinking block where nobody says; None where that isn't known.
    """

    prompt: Prompt
    model: str
    sampling: SamplingOptions
    seed: int | None
    kwargs: Mapping[str, Any]
    tools: Sequence[Any]
    hash: str
    thinks_by_default: bool | None = None

    @property
    def thinking(self) -> bool | None:
        """Whether the target thinks first; None where that isn't known."""
        value = self.kwargs.get(THINKING_FLAG)
        return value if isinstance(value, bool) else self.thinks_by_default

    def with_other_seed(self, number: int) -> Request:
        """The same question for another answer, after one that was empty or broken off."""
        if self.sampling.seed is None:
            return self
        return replace(self, seed=request_seed(self.sampling.seed, f"{self.prompt.id}\0{number}"))


def make_request(prompt: Prompt, run: GenerateRun, model: str, *, thinks_by_default: bool | None = None) -> Request:
    """The request for a prompt of a run."""
    sampling = run.sampling
    values = sampling.model_dump()
    if prompt.sampling:
        sampling = SamplingOptions.model_validate(values | dict(prompt.sampling))
        values = sampling.model_dump()
    seed = None if sampling.seed is None else request_seed(sampling.seed, prompt.id)
    kwargs = {**run.template_kwargs, **prompt.chat_template_kwargs}
    tools = prompt.tools or list(run.tools)
    parts = msgspec.json.encode([prompt.messages, model, values, kwargs, tools], order="deterministic")
    digest = hashlib.sha256(parts).hexdigest()[:32]
    return Request(prompt, model, sampling, seed, kwargs, tools, digest, thinks_by_default)


def request_seed(seed: int, text: str) -> int:
    """A seed from 0 to 2^31 - 1 that depends on the run's seed and the prompt's id alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=4).digest()) >> 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a server sampled, before it is judged.

    Attributes:
        message: the assistant's, as the server parsed it.
        finish_reason: in the server's words.
        output_tokens: as the server counted them.
        prompt_tokens: likewise.
        output_token_ids: where the server gives them.
        prompt_token_ids: likewise.
        fingerprint: the server's `system_fingerprint`.
        model: the name that the server answered under.
        starts_in_trace: the prompt is known to end with an opened thinking block, and the text is as it was sampled.
    """

    message: dict[str, Any]
    finish_reason: Any
    output_tokens: Any = None
    prompt_tokens: Any = None
    output_token_ids: Any = None
    prompt_token_ids: Any = None
    fingerprint: Any = None
    model: Any = None
    starts_in_trace: bool = False


class Dialect(Protocol):
    """How one kind of server is asked."""

    def url(self, endpoint: str) -> str:
        """Where requests go."""
        ...

    def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON; raises RecordError for a prompt that can't be asked for."""
        ...

    def read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Sampled:
        """What a reply to a body says; raises LookupError, TypeError or ValueError for one of another shape."""
        ...


class OpenAIDialect:
    """`/chat/completions`; `return_token_ids` is vLLM's, and others ignore it."""

    def url(self, endpoint: str) -> str:
        """See `Dialect.url`."""
        return f"{endpoint}/chat/completions"

    def body(self, request: Request) -> dict[str, Any]:
        """See `Dialect.body`."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": request.model,
            "messages": [_wire_message(message) for message in request.prompt.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "return_token_ids": True,
        }
        optional = {
            "top_k": sampling.top_k,
            "seed": request.seed,
            "tools": request.tools or None,
            "chat_template_kwargs": dict(request.kwargs) or None,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Sampled:  # noqa: ARG002 (it says all itself)
        """See `Dialect.read`."""
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        message = choice["message"]
        if not isinstance(message, dict):
            raise TypeError("choices[0].message is no object")
        return Sampled(
            message,
            choice.get("finish_reason"),
            usage.get("completion_tokens"),
            usage.get("prompt_tokens"),
            choice.get("token_ids"),
            reply.get("prompt_token_ids"),
            reply.get("system_fingerprint"),
            reply.get("model"),
        )


@dataclass(frozen=True, slots=True)
class SGLangDialect:
    """SGLang's native `/generate`: ids in, ids out; the template is rendered here."""

    tokenizer: TargetTokenizer

    def url(self, endpoint: str) -> str:
        """See `Dialect.url`; the native API lies beside `/v1`."""
        return f"{endpoint.removesuffix('/v1')}/generate"

    def body(self, request: Request) -> dict[str, Any]:
        """See `Dialect.body`."""
        sampling = request.sampling
        optional = {"top_k": sampling.top_k, "sampling_seed": request.seed}
        return {
            "input_ids": self._prompt_ids(request),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_new_tokens": sampling.max_tokens,
                **{name: value for name, value in optional.items() if value is not None},
            },
        }

    def read(self, reply: Mapping[str, Any], sent: Mapping[str, Any]) -> Sampled:
        """See `Dialect.read`; what it prefilled are the ids that it was sent."""
        meta = reply["meta_info"]
        ended = meta["finish_reason"]
        return Sampled(
            {"role": "assistant", "content": reply["text"]},
            ended["type"] if isinstance(ended, dict) else ended,
            meta.get("completion_tokens"),
            meta.get("prompt_tokens"),
            reply.get("output_ids"),
            sent["input_ids"],
            starts_in_trace=self._opens_trace(sent["input_ids"]),
        )

    def _opens_trace(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the tag that opens a trace; a tag is at most a few tokens."""
        end = self.tokenizer.backend.decode(list(prompt_ids[-_TAG_TOKENS:]), skip_special_tokens=False)
        return end.rstrip().endswith(OPEN_TAG)

    def _prompt_ids(self, request: Request) -> list[int]:
        return prompt_token_ids(self.tokenizer, request.prompt.messages, request.tools, request.kwargs)


def _wire_message(message: Any) -> Any:
    """A message as OpenAI's API has it: the arguments of earlier tool calls as text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_wire_call(call) for call in calls]}


def _wire_call(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}
