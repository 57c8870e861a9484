"""`dflash serve` as a process: the official client, token ids, refusals, a whole generation, a clean end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import openai
import pytest
import torch

from dflash.data.tokenizer import load_tokenizer
from dflash.errors import ServiceError, UsageError
from dflash.generate.config import GenerateRun, SamplingOptions
from dflash.model.drafter import Drafter
from dflash.model.export import ExportOptions, export_drafter
from dflash.model.features import Target
from dflash.model.layout import DrafterConfig
from dflash.serving.server import CLOSE_S, GRACE_S, ServeOptions, serve
from tests.generate.conftest import completions, generate, prompt, write_prompts
from tests.serving.server_process import serving


@pytest.fixture(scope="module")
def server(tiny_target: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving(tiny_target) as started:
        yield started


def test_it_answers_the_official_client_and_a_whole_generation(
    server: tuple[str, subprocess.Popen[str]], tmp_path: Path, smollm2_tokenizer_dir: Path
) -> None:
    url, _ = server
    assert url.startswith("http://127.0.0.1:")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "Name a colour."}]
        reply = client.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        ids = reply.choices[0].token_ids  # type: ignore[attr-defined]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(ids)
        tokenizer = load_tokenizer(smollm2_tokenizer_dir)
        shown = ids[:-1] if ids[-1] == 2 else ids
        assert reply.choices[0].message.content == tokenizer.backend.decode(shown, skip_special_tokens=False)
        for bad in ({"model": "other"}, {"max_tokens": 100_000}, {"n": 2}, {"messages": [{"role": "king"}]}):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
                client.chat.completions.create(**{"model": "tiny", "messages": messages, **bad})  # type: ignore[call-overload]
    path = write_prompts(tmp_path / "prompts.jsonl", [prompt(number) for number in range(12)])
    run = GenerateRun(
        prompts=str(path),
        batch=str(tmp_path / "batch"),
        endpoints=(url,),
        sampling=SamplingOptions(max_tokens=6, seed=3),
        max_attempts=2,
        max_failed_share=1,
    )
    assert generate(run, tmp_path / "work").is_complete
    for one in completions(tmp_path / "batch"):
        assert one.prompt_token_ids
        assert one.output_tokens == len(one.output_token_ids or ())


def complete(url: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 12, "temperature": 0}
    body = json.dumps(asked | {"return_token_ids": True} | fields).encode()
    request = Request(f"{url}/chat/completions", body, {"content-type": "application/json"})  # noqa: S310 (loopback)
    with urlopen(request, timeout=60) as reply:  # noqa: S310
        found: dict[str, Any] = json.load(reply)
    return found


def test_a_drafter_drafts_the_same_answer_and_its_tau_is_told(
    server: tuple[str, subprocess.Popen[str]], tiny_target: Path, tmp_path: Path
) -> None:
    target = Target.load(str(tiny_target), (0,))
    config = DrafterConfig.for_target(
        target.text_config, mask_token_id=16, num_hidden_layers=1, block_size=4, target_layer_ids=(0,)
    )
    drafter = Drafter(config)
    drafter.initialize(torch.Generator().manual_seed(2), std=0.2)
    export_drafter(drafter, tmp_path / "drafter", ExportOptions("sglang"))
    plain = complete(server[0])
    assert plain["dflash"].keys() == {"seconds", "tokens_per_s"}
    with serving(tiny_target, "--drafter", str(tmp_path / "drafter")) as (url, _):
        drafted = complete(url)
        told = drafted["dflash"]
        assert "tau" not in complete(url, top_k=3)["dflash"], "what the drafter can't do the target does alone"
    assert drafted["choices"] == plain["choices"]
    assert told["speculative"] is True
    assert told["rounds"] >= 1
    assert 1 <= told["tau"] <= 4, "a block has four tokens"


def test_a_stopping_server_waits_for_nobody_long(server: tuple[str, subprocess.Popen[str]]) -> None:
    """One client has sent half a request, another keeps its connection; both hold nothing up."""
    url, process = server
    address = (urlsplit(url).hostname, urlsplit(url).port)
    with socket.create_connection(address) as stuck, socket.create_connection(address) as idle:
        stuck.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        reply = b"".join(iter(lambda: stuck.recv(4096), b""))
        assert time.monotonic() - started < GRACE_S + CLOSE_S + 8, "thirty seconds were too long"
        assert b"503 Service Unavailable" in reply
        assert b'"error":{"message":"the server is stopping' in reply
        assert process.wait(60) == 0


@pytest.mark.parametrize("host", ["", "a" * 300, "999.1.1.1"])
def test_what_is_no_address_is_refused_before_anything_loads(tmp_path: Path, host: str) -> None:
    with pytest.raises(ServiceError, match=r"can't be listened at: .*\. Choose another --host or --port\."):
        serve(ServeOptions("none", host=host), None, tmp_path, lambda _: None)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused_before_anything_loads(tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="expected cpu, or cuda"):
        serve(ServeOptions("none", device=device), None, tmp_path, lambda _: None)
