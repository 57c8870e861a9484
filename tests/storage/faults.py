"""A store that fails where a plan says, for crash tests: killed, failed or without a reply at the k-th write.

Count the points of an operation first, then drive each of them:

```python
plan = FaultPlan()                                     # counts only
publish(FaultStore(open_store(uri), plan))
for point in range(1, len(plan.calls) + 1):
    for when in ("before", "after"):
        in a fresh process: publish(FaultStore(open_store(uri), FaultPlan(point, when, "kill")))
        assert the old or the new version loads whole, and that a rerun finishes
```

Stores that share a plan share its count, so a copy between two of them is one call. Wrap both. Code that opens its own
stores gets the wrapper by replacing its `open_store` in the process that is to be killed; it exits with -SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from dflash.errors import StorageError
from dflash.storage import ObjectInfo, Store, Transfer, UploadInfo

T = TypeVar("T")


@dataclass(slots=True)
class FaultPlan:
    """What goes wrong, and where.

    Attributes:
        at: number of the mutating call, from 1; 0 never.
        when: `before` the call reaches the store, or `after` it took effect.
        action: `kill` ends the process with SIGKILL; `fail` raises StorageError, which `after` means a lost reply.
        calls: all mutating calls so far, such as `put_if_absent shards/ab.arrow`.
    """

    at: int = 0
    when: Literal["before", "after"] = "before"
    action: Literal["kill", "fail"] = "fail"
    calls: list[str] = field(default_factory=list)

    def run(self, call: str, operation: Callable[[], T]) -> T:
        """Run one mutating call with its fault."""
        self.calls.append(call)
        is_due = len(self.calls) == self.at
        if is_due and self.when == "before":
            self._strike(call)
        result = operation()
        if is_due and self.when == "after":
            self._strike(call)
        return result

    def _strike(self, call: str) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StorageError(f"planned fault {self.when} call {self.at}: {call}")


class Faster(FaultPlan):
    """Somebody else acts right before the pointer is replaced."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def run(self, call: str, operation: Callable[[], T]) -> T:
        """Run one call, after the other's act where it is the pointer's."""
        if call == "replace state.json":
            self.act()
        return operation()


class FaultStore(Store):
    """A store with a plan of faults; reads pass through."""

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        super().__init__(inner.uri)
        self.inner = inner
        self.plan = plan
        self.counters = inner.counters

    def __reduce__(self) -> tuple[type[FaultStore], tuple[Store, FaultPlan]]:
        return (FaultStore, (self.inner, self.plan))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.inner.list(prefix)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def read(
        self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None, max_bytes: int | None = None
    ) -> bytes:
        return self.inner.read(key, expect=expect, sha256=sha256, max_bytes=max_bytes)

    def download(
        self, key: str, path: Path, *, expect: ObjectInfo | None = None, sha256: str | None = None
    ) -> Transfer:
        return self.inner.download(key, path, expect=expect, sha256=sha256)

    def verify(self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None) -> Transfer:
        return self.inner.verify(key, expect=expect, sha256=sha256)

    def put_if_absent(self, key: str, source: bytes | Path, *, sha256: str | None = None) -> bool:
        return self.plan.run(f"put_if_absent {key}", lambda: self.inner.put_if_absent(key, source, sha256=sha256))

    def replace(self, key: str, data: bytes, *, if_match: str | None) -> str:
        return self.plan.run(f"replace {key}", lambda: self.inner.replace(key, data, if_match=if_match))

    def copy(
        self, source_key: str, target_store: Store, target_key: str, *, size: int, sha256: str | None = None
    ) -> Transfer:
        target = target_store.inner if isinstance(target_store, FaultStore) else target_store
        return self.plan.run(
            f"copy {source_key} {target_key}",
            lambda: self.inner.copy(source_key, target, target_key, size=size, sha256=sha256),
        )

    def delete(self, keys: Sequence[str]) -> None:
        self.plan.run(f"delete {' '.join(keys)}", lambda: self.inner.delete(keys))

    def list_uploads(self, prefix: str = "") -> tuple[UploadInfo, ...]:
        return self.inner.list_uploads(prefix)

    def abort_upload(self, upload: UploadInfo) -> None:
        self.plan.run(f"abort_upload {upload.key}", lambda: self.inner.abort_upload(upload))

    def identify(self, info: ObjectInfo) -> str:
        return self.inner.identify(info)

    def probe_conditional_writes(self) -> None:
        self.inner.probe_conditional_writes()


class WatchedStore(FaultStore):
    """A store whose looks and reads are points of its plan too, to stop one of two writers between any two steps."""

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.plan.run(f"list {prefix}", lambda: self.inner.list(prefix))

    def head(self, key: str) -> ObjectInfo:
        return self.plan.run(f"head {key}", lambda: self.inner.head(key))

    def read(
        self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None, max_bytes: int | None = None
    ) -> bytes:
        return self.plan.run(
            f"read {key}", lambda: self.inner.read(key, expect=expect, sha256=sha256, max_bytes=max_bytes)
        )

    def download(
        self, key: str, path: Path, *, expect: ObjectInfo | None = None, sha256: str | None = None
    ) -> Transfer:
        return self.plan.run(f"download {key}", lambda: self.inner.download(key, path, expect=expect, sha256=sha256))
