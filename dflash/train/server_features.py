"""Features from a vLLM server that extracts hidden states, for targets that only an engine can run.

The server is started with `--speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}}'`, without prefix cache and chunked
prefill, and with the connector that writes each request's states into a folder: `docs/operations.md` has the command.
vLLM counts layers from 1 (id + 1 of `target_layer_ids`).

For each row one request with its ids goes out, and the answer names a safetensors file with `token_ids` [S] and
`hidden_states` [S, K, H]. What comes back belongs to the row only if its ids are the row's, one state for each: a
prefix cache shortens states silently, and a queue of answers can be mixed up.

Legend: S tokens of a row, K target layers, H hidden size, F = K * H.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash.data.batches import Pack
from dflash.data.row_reader import Row
from dflash.errors import TrainingError
from dflash.train.feature_source import States, TargetEnds, row_digest

# Requests at a time: enough for the engine to fill its own batches.
REQUESTS = 16
_ATTEMPTS = 4
_FILE_S = 60.0
_LARGEST_ANSWER = 1 << 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # coarser ones lose what the drafter shall learn from
_LARGEST_VALUE, _ROOM = 8, 1 << 20  # bytes of a value, values beside the states: ids, names, shapes


@dataclass(frozen=True, slots=True)
class FeatureServer:
    """How the server is reached.

    Attributes:
        url: of the server.
        model: its name there.
        folder: where it writes; files outside are neither read nor removed.
        timeout_s: of a row's requests together: silence after which the run ends.
    """

    url: str
    model: str
    folder: Path
    timeout_s: float


class ServerFeatures:
    """Asks for the rows of coming packs ahead of their step.

    Args:
        server: where.
        ends: the target's embedding and head, on the drafter's device.
        num_layers: K.
    """

    def __init__(self, server: FeatureServer, ends: TargetEnds, num_layers: int) -> None:
        self._server = server
        self._ends = ends
        self._num_layers = num_layers
        self._threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="features")
        self._coming: dict[tuple[int, tuple[int, int]], Future[Tensor]] = {}

    @property
    def ends(self) -> TargetEnds:
        """Embedding and head."""
        return self._ends

    def prepare(self, packs: Sequence[Pack | None]) -> None:
        """Send the requests that weren't sent yet, and forget those of steps that are done."""
        wanted = {(pack.index, row.key): row for pack in packs if pack is not None for row in pack.rows}
        self._coming = {place: future for place, future in self._coming.items() if place in wanted}
        for place, row in wanted.items():
            if place not in self._coming:
                self._coming[place] = self._threads.submit(self._fetch, row)

    def states(self, pack: Pack) -> States:
        """Return a pack's features.

        Raises:
            TrainingError: the server can't be reached or refuses, or what it gives isn't the row's.
        """
        found = [self._coming[pack.index, row.key].result() for row in pack.rows]
        like = self._ends.embedding_VH
        return States(torch.cat(found).to(like.device, like.dtype), None)

    def close(self, failed: BaseException | None = None) -> None:
        """Drop what wasn't sent; after an error what was sent isn't waited for."""
        self._threads.shutdown(wait=failed is None, cancel_futures=True)

    def _fetch(self, row: Row) -> Tensor:
        body = {"model": self._server.model, "prompt": row.input_ids.tolist(), "max_tokens": 1, "temperature": 0}
        path = self._named(row, self._post("/v1/completions", body, row))
        try:
            found = self._checked(row, self._read(path, row))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # files that stay fill the memory that they lie in
            raise self._wrong(row, f"that files in {self._server.folder} can be removed", error) from error
        return found

    def _named(self, row: Row, answer: dict[str, Any]) -> Path:
        """Return the file that an answer names."""
        named = answer.get("kv_transfer_params")
        named = named.get("hidden_states_path") if isinstance(named, dict) else None
        if not isinstance(named, str):
            raise self._wrong(row, "a hidden_states_path in kv_transfer_params", f"the keys {sorted(answer)}")
        try:
            path, folder = Path(named).resolve(), self._server.folder.resolve()
            inside = folder in path.parents and not path.is_dir()
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links that lead to themselves
            inside = False
        if not inside:
            raise self._wrong(row, f"a file inside topology.server_folder {self._server.folder}", repr(named[:300]))
        return path

    def _shape(self, row: Row) -> tuple[int, int, int]:
        return (len(row.input_ids), self._num_layers, self._ends.embedding_VH.shape[1])

    def _checked(self, row: Row, tensors: dict[str, Tensor]) -> Tensor:
        """Return [S, F] if the tensors are those of the row."""
        shape, ids, hidden = self._shape(row), tensors.get("token_ids"), tensors.get("hidden_states")
        if ids is None or hidden is None:
            raise self._wrong(row, "tensors token_ids and hidden_states", sorted(tensors))
        if hidden.dtype not in _DTYPES:
            raise self._wrong(row, f"hidden states of {' or '.join(map(str, _DTYPES))}", hidden.dtype)
        if ids.flatten().tolist() != row.input_ids.tolist():
            raise self._wrong(row, f"the row's {len(row.input_ids)} ids back", f"{ids.numel()} others")
        if tuple(hidden.shape) != shape:
            raise self._wrong(row, f"hidden states {shape}", f"{tuple(hidden.shape)}; turn prefix caching off")
        return hidden.flatten(1)

    def _read(self, path: Path, row: Row) -> dict[str, Tensor]:
        """Read a file that the server may still be writing."""
        deadline, most = time.monotonic() + _FILE_S, _LARGEST_VALUE * (math.prod(self._shape(row)) + _ROOM)
        while True:
            try:
                if (size := path.stat().st_size) > most:
                    raise self._wrong(row, f"a file of at most {most} bytes", f"{size} in {path.name}")
                return load_file(path)
            except (OSError, SafetensorError) as error:
                if time.monotonic() > deadline:
                    raise self._wrong(row, f"a whole safetensors file {path.name}", error) from error
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, Any], row: Row) -> dict[str, Any]:
        """Ask, again after a failure that may pass."""
        last, deadline = "nothing", time.monotonic() + self._server.timeout_s
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(max(0.0, min(0.2 * 4**attempt, deadline - time.monotonic())))
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            try:
                status, data = self._ask(path, json.dumps(body), row_digest(row)[:32], left_s)
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
                continue
            if status == http.client.OK:
                try:
                    answer = json.loads(data)
                except (ValueError, RecursionError):
                    answer = None
                if isinstance(answer, dict):
                    return answer
                raise self._wrong(row, "a JSON object", repr(data[:200]))
            last = f"status {status}: {data[:200]!r}"
            if status < http.client.INTERNAL_SERVER_ERROR and status != http.client.TOO_MANY_REQUESTS:
                break
        raise self._wrong(row, "an answer", last)

    def _ask(self, path: str, body: str, name: str, timeout_s: float) -> tuple[int, bytes]:
        parts = urlsplit(self._server.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json", "X-Request-Id": name}
            connection.request("POST", parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            data = response.read(_LARGEST_ANSWER)
            if response.length:  # what was announced and didn't come, or is more than any answer
                raise http.client.IncompleteRead(data, response.length)
            return response.status, data
        finally:
            connection.close()

    def _wrong(self, row: Row, expected: str, found: object) -> TrainingError:
        return TrainingError(
            f"The feature server {self._server.url} (model {self._server.model}) didn't serve row {row.sample_id!r}: "
            f"expected {expected}, found {found}. Look at its log; docs/operations.md has how it is started. The same "
            "run, started again, goes on from the newest checkpoint."
        )
