"""A batch on the real S3 server, with prompts there too, by two writers at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.generate.config import GenerateRun
from dflash.generate.session import GenerateSession
from tests.generate.conftest import prompt
from tests.generate.stub_server import Stub, serving

if TYPE_CHECKING:
    from dflash.storage import S3Store
    from embedded.seaweedfs import SeaweedServer


def test_two_writers_put_each_id_once(s3_server: SeaweedServer, s3_store: S3Store, tmp_path: Path) -> None:
    lines = [json.dumps(prompt(number)) + "\n" for number in range(40)]
    s3_store.put_if_absent("prompts/a.jsonl", "".join(lines).encode())
    with serving(Stub()) as stub:
        run = GenerateRun(
            prompts=f"{s3_store.uri}/prompts",
            batch=f"{s3_store.uri}/batches/one",
            endpoints=(stub.url,),
            part_records=7,
            max_in_flight=8,
        )

        def work(name: str) -> None:
            with GenerateSession(run, None, tmp_path / name, s3_server.credentials) as session:
                session.plan()
                session.finish(session.generate())

        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    keys = [item.key for item in s3_store.list("batches/one")]
    parts = [key for key in keys if key.endswith(".jsonl")]
    found = [json.loads(line)["id"] for key in parts for line in s3_store.read(key).splitlines()]
    assert sorted(found) == sorted(f"q-{number}" for number in range(40))
    assert "batches/one/_SUCCESS" in keys
