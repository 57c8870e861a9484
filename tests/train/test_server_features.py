"""Features from a server, over real HTTP: the losses of a colocated run, and nothing that isn't the row's own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash.data.batches import BatchState, Pack
from dflash.data.row_reader import Row
from dflash.errors import TrainingError
from dflash.model.features import Target
from dflash.train import server_features
from dflash.train.curves import read_metrics
from dflash.train.feature_source import FeatureSource
from dflash.train.job import Places, Watch, train_run
from dflash.train.run import TrainRun
from dflash.train.server_features import FeatureServer, ServerFeatures
from dflash.train.setup import ends_of
from tests.train.tiny_run import publish_rows, tiny_run, write_target

LAYERS = (0, 2)
Tensors = dict[str, torch.Tensor]


class TinyServer:
    """Answers as vLLM does: it writes a file with the states of the prompt and names it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.requests: list[dict[str, Any]] = []
        self.failures = 0
        self.change: Callable[[Tensors], Tensors] = lambda tensors: tensors
        self.named: str | None = None
        self.bodies: list[bytes] = []  # in place of answers
        self.missing = 0  # bytes that are announced and don't come
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status, answer = server.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                body = server.bodies.pop(0) if server.bodies else json.dumps(answer).encode()
                missing, server.missing = server.missing, 0
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + missing))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        asked = json.loads(body)
        if self.failures:
            self.failures -= 1
            return 503, {"error": "loading"}
        if path != "/v1/completions" or asked["model"] != "tiny":
            return 404, {"error": "no such model"}
        self.requests.append(asked)
        ids = torch.tensor(asked["prompt"])
        states = self.target.features(ids).view(len(ids), len(LAYERS), -1)
        file = self.folder / f"request-{len(self.requests)}.safetensors"
        save_file(self.change({"token_ids": ids, "hidden_states": states}), file)
        return 200, {"choices": [], "kv_transfer_params": {"hidden_states_path": self.named or str(file)}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def server(tmp_path: Path, path: Path) -> Iterator[TinyServer]:
    folder = tmp_path / "states"
    folder.mkdir()
    one = TinyServer(Target.load(str(path), LAYERS), folder)
    thread = threading.Thread(target=one.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield one
    finally:
        one.http.shutdown()
        thread.join()
        one.http.server_close()


@pytest.fixture
def features(server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerFeatures]:
    monkeypatch.setattr(server_features, "_FILE_S", 0.2)
    found = ServerFeatures(
        FeatureServer(server.url, "tiny", server.folder, timeout_s=30), ends_of(server.target), len(LAYERS)
    )
    try:
        yield found
    finally:
        found.close()


def pack_of(*lengths: int) -> Pack:
    rows = [
        Row((0, place), np.arange(1, length + 1, dtype=np.int32), np.ones(length, np.bool_), f"sample-{place}", "made")
        for place, length in enumerate(lengths)
    ]
    return Pack(tuple(rows), 3, 0, BatchState())


def test_a_run_on_a_servers_features_has_the_losses_of_a_colocated_one(
    tmp_path: Path, path: Path, server: TinyServer
) -> None:
    publish_rows(str(tmp_path / "data"), tmp_path / "made", num_shards=1)
    topology = {"mode": "server", "server_url": server.url, "server_folder": str(server.folder), "server_model": "tiny"}
    for name, changed in (("here", {}), ("there", {"topology": topology})):
        values = tiny_run(str(tmp_path / "data"), path, str(tmp_path / name), num_epochs=2, **changed)
        train_run(TrainRun.model_validate(values), Places(tmp_path / "work"), Watch(), torch.device("cpu"))
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("here", "there")]
    # The server sees each row alone; in a pack rows of similar length go through the target together.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(server.requests) == 2 * 6
    assert list(server.folder.iterdir()) == []


def test_a_server_that_is_still_loading_is_asked_again(server: TinyServer, features: ServerFeatures) -> None:
    server.failures = 2
    pack = pack_of(5, 9)
    assert isinstance(features, FeatureSource)
    features.prepare([pack, None])
    states = features.states(pack)
    assert torch.equal(states.features_SF[:5], server.target.features(torch.arange(1, 6)))
    half = pack.halves()[1]
    assert torch.equal(features.states(half).features_SF, states.features_SF[5:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors | {"token_ids": tensors["token_ids"] + 1}, "ids back, found 5 others"),
        (lambda tensors: tensors | {"hidden_states": tensors["hidden_states"][1:].contiguous()}, "prefix caching off"),
        (lambda tensors: tensors | {"hidden_states": tensors["hidden_states"][:, :1].contiguous()}, r"\(5, 1, 32\)"),
        (lambda tensors: {"token_ids": tensors["token_ids"]}, "tensors token_ids and hidden_states"),
        (
            lambda tensors: tensors | {"hidden_states": tensors["hidden_states"].to(torch.float8_e4m3fn)},
            "hidden states of .*float8",
        ),
        (lambda tensors: tensors | {"more": torch.zeros(9 << 20, dtype=torch.uint8)}, "a file of at most"),
    ],
    ids=["another row's", "shortened", "a layer less", "no states", "too coarse", "a huge file"],
)
def test_states_that_are_not_the_rows_are_refused(
    server: TinyServer, features: ServerFeatures, change: Callable[[Tensors], Tensors], message: str
) -> None:
    server.change = change
    features.prepare([pack_of(5)])
    with pytest.raises(TrainingError, match=rf"(?s)'sample-0'.*{message}"):
        features.states(pack_of(5))


def test_a_file_elsewhere_is_neither_read_nor_removed(
    tmp_path: Path, server: TinyServer, features: ServerFeatures
) -> None:
    other = tmp_path / "precious"
    other.write_text("mine")
    (server.folder / "inner").mkdir()
    for named in (
        *(str(other), str(server.folder / ".." / "precious"), str(server.folder), ".", "a\0b", "x" * 5000),
        str(server.folder / "inner"),
    ):
        server.named = named
        features.prepare([])
        features.prepare([pack_of(5)])
        with pytest.raises(TrainingError, match="a file inside"):
            features.states(pack_of(5))
    server.named = str(server.folder / "missing.safetensors")
    features.prepare([])
    features.prepare([pack_of(5)])
    with pytest.raises(TrainingError, match="a whole safetensors file"):
        features.states(pack_of(5))
    assert other.read_text() == "mine"


def test_an_answer_that_was_cut_is_asked_for_again(server: TinyServer, features: ServerFeatures) -> None:
    server.bodies, server.missing = [b'{"choices": [], "kv'], 200
    features.prepare([pack_of(5)])
    assert torch.equal(features.states(pack_of(5)).features_SF, server.target.features(torch.arange(1, 6)))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"[]", b"{", b"\xff", b'{"kv_transfer_params": ["hidden_states_path"]}', b'{"choices": 1}'],
    ids=["deep", "a list", "half", "no text", "a list of parameters", "no parameters"],
)
def test_an_answer_that_names_no_file_is_refused(server: TinyServer, features: ServerFeatures, body: bytes) -> None:
    server.bodies = [body]
    features.prepare([pack_of(5)])
    with pytest.raises(TrainingError, match=r"sample-0.*expected a"):
        features.states(pack_of(5))


def test_a_file_that_stays_is_named(
    server: TinyServer, features: ServerFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    features.prepare([pack_of(5)])
    with pytest.raises(TrainingError, match=r"can be removed, found .*Permission denied"):
        features.states(pack_of(5))


def test_a_server_that_is_silent_ends_the_run_after_the_time_that_it_has(features: ServerFeatures) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        server = FeatureServer(f"http://127.0.0.1:{deaf.getsockname()[1]}", "tiny", Path("/nowhere"), timeout_s=0.5)
        other = ServerFeatures(server, features.ends, len(LAYERS))
        started = time.monotonic()
        other.prepare([pack_of(5)])
        with pytest.raises(TrainingError, match=r"expected an answer, found TimeoutError"):
            other.states(pack_of(5))
        assert time.monotonic() - started < 5
        other.close()


def test_a_server_that_refuses_or_is_gone_is_named(server: TinyServer, features: ServerFeatures) -> None:
    other = ServerFeatures(FeatureServer(server.url, "huge", server.folder, 5), features.ends, len(LAYERS))
    other.prepare([pack_of(5)])
    with pytest.raises(TrainingError, match=r"status 404: .*no such model"):
        other.states(pack_of(5))
    other.close()
