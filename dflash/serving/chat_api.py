"""`/v1/chat/completions` and what belongs to it: requests checked, replies in OpenAI's words with vLLM's token ids."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dflash.data.chat import RESERVED_KWARGS, template_messages
from dflash.data.messages import normalise_message
from dflash.data.prompting import prompt_token_ids
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import RecordError, ServiceError
from dflash.eval.sampling import Sampling
from dflash.serving.decoding import Decoding
from dflash.serving.engine import Decoded, Engine
from dflash.validation import problems_of

MAX_BODY_BYTES = 64 << 20

log = logging.getLogger(__name__)


class ChatRequest(BaseModel):
    """The fields that are understood; others that clients send are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    temperature: float = Field(default=1.0, ge=0, le=5)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False
    # What would change the answer and isn't there is refused, not passed over.
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    stop: None = None
    response_format: None = None
    logit_bias: None = None
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    min_p: float | None = Field(default=None, ge=0, le=0)


@dataclass
class Refusal(Exception):  # noqa: N818 (a reply, not an error of ours)
    """A reply other than 200."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None

    def response(self) -> JSONResponse:
        """The reply in OpenAI's words."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        content = {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.code}}
        return JSONResponse(content, self.status, headers)


@dataclass(frozen=True, slots=True)
class ChatServer:
    """What the routes need.

    Attributes:
        engine: decodes.
        tokenizer: the target's.
        name: the model's name in requests and replies.
        max_tokens: longest sequence, prompt included.
        end_ids: end a sequence.
    """

    engine: Engine
    tokenizer: TargetTokenizer
    name: str
    max_tokens: int
    end_ids: Collection[int]

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _not_there, Exception: _failed})

    async def _health(self, _request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "model": self.name})

    async def _models(self, _request: Request) -> JSONResponse:
        model = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "dflash",
            "max_model_len": self.max_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> JSONResponse:
        try:
            asked, body_bytes = await _read(request)
            decoding = await asyncio.to_thread(self._decoding, asked, body_bytes)
            decoded = await self._decoded(decoding, request)
        except Refusal as refusal:
            return refusal.response()
        except ClientDisconnect:
            return Refusal(499, "the client has gone").response()  # nobody reads it
        except asyncio.CancelledError:  # uvicorn does it when its time to stop is over, and awaits nothing behind it
            return Refusal(503, "the server is stopping; ask another one", "overloaded").response()
        return JSONResponse(self._reply(asked, decoding, decoded))

    async def _decoded(self, decoding: Decoding, request: Request) -> Decoded:
        future = self.engine.submit(decoding)
        if future is None:
            raise Refusal(429, "too many requests wait; try again", "overloaded")
        try:
            return await _unless_gone(asyncio.wrap_future(future), request)
        except ClientDisconnect:
            raise
        except ServiceError as error:
            raise Refusal(503, str(error), "overloaded") from error
        except Exception as error:
            log.exception("decoding failed")
            raise Refusal(500, f"decoding failed: {type(error).__name__}: {error}", "server_error") from error
        finally:
            decoding.given_up.set()

    def _decoding(self, asked: ChatRequest, body_bytes: int) -> Decoding:
        """Render and check a request."""
        if asked.model not in (None, self.name):
            raise Refusal(404, f"the model {asked.model!r} is not served; expected {self.name!r}", "not_found_error")
        if reserved := RESERVED_KWARGS.intersection(asked.chat_template_kwargs):
            raise Refusal(400, f"chat_template_kwargs: {', '.join(sorted(reserved))} can't be passed")
        try:
            self._require_short(asked, body_bytes)
            ids = prompt_token_ids(self.tokenizer, asked.messages, asked.tools, asked.chat_template_kwargs)
        except RecordError as error:
            raise Refusal(400, str(error)) from error
        room = self.max_tokens - len(ids)
        limit = asked.max_completion_tokens or asked.max_tokens or max(1, room)
        if limit > room:
            raise self._too_long(f"the prompt has {len(ids)} and {limit} are asked for")
        if not ids:
            raise Refusal(400, "the template renders nothing of this prompt")
        seed = int.from_bytes(uuid.uuid4().bytes[:4]) if asked.seed is None else asked.seed % 2**63
        return Decoding(ids, limit, Sampling(asked.temperature, asked.top_p, seed), asked.top_k)

    def _require_short(self, asked: ChatRequest, body_bytes: int) -> None:
        """Refuse what is too long whatever its tokens are: encoding megabytes would take longer than clients wait."""
        longest = self.tokenizer.token_bytes.longest
        if longest is None or body_bytes <= self.max_tokens * longest:
            return
        plain = [normalise_message(message, index, thinking_off=False) for index, message in enumerate(asked.messages)]
        template, kwargs = self.tokenizer.template, asked.chat_template_kwargs
        text = template.render(template_messages(plain), asked.tools, kwargs, add_generation_prompt=True)
        size = self.tokenizer.token_bytes.normalised_size(text)
        if size > self.max_tokens * longest:
            raise self._too_long(f"the prompt has at least {size // longest} in {size} bytes")

    def _too_long(self, found: str) -> Refusal:
        message = f"This model's maximum context length is {self.max_tokens} tokens; {found}."
        return Refusal(400, message, code="context_length_exceeded")

    def _reply(self, asked: ChatRequest, decoding: Decoding, decoded: Decoded) -> dict[str, Any]:
        ended = decoded.ids[-1] in self.end_ids
        text = self.tokenizer.backend.decode(decoded.ids[:-1] if ended else decoded.ids, skip_special_tokens=False)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if ended else "length",
            "logprobs": None,
        }
        prompt, output = len(decoding.prompt_ids), len(decoded.ids)
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
            "dflash": {"seconds": round(decoded.seconds, 4), "tokens_per_s": round(output / decoded.seconds, 2)},
        }
        if decoded.accepted is not None:
            rounds = len(decoded.accepted)
            tau = (sum(decoded.accepted) + rounds) / rounds if rounds else 0.0
            reply["dflash"] |= {"speculative": True, "rounds": rounds, "tau": round(tau, 3)}
        if asked.return_token_ids:
            choice["token_ids"] = decoded.ids
            reply["prompt_token_ids"] = list(decoding.prompt_ids)
        return reply


async def _unless_gone(answer: asyncio.Future[Decoded], request: Request) -> Decoded:
    """Wait for an answer as long as its client does: others would queue behind what nobody reads."""
    gone = asyncio.ensure_future(request.receive())  # behind a whole body nothing else comes
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        gone.cancel()
        answer.cancel()


async def _read(request: Request) -> tuple[ChatRequest, int]:
    """The body, checked, and its size; one that is too large is read to its end, so that its sender hears of it."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > MAX_BODY_BYTES:
        raise Refusal(413, f"the request has {size >> 20} MiB; expected at most {MAX_BODY_BYTES >> 20} MiB")
    try:
        return ChatRequest.model_validate_json(b"".join(chunks)), size
    except ValidationError as error:
        problems = problems_of(error)
        raise Refusal(400, problems) from error


def _not_there(request: Request, error: Exception) -> JSONResponse:
    """A path or a method that isn't served."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    return Refusal(status, f"{request.method} {request.url.path} is not served", "not_found_error").response()


def _failed(_request: Request, error: Exception) -> JSONResponse:
    """A failure that nobody expected; the server's log has the whole of it."""
    return Refusal(500, f"the server failed: {type(error).__name__}: {error}", "server_error").response()
