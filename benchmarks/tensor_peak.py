"""Peak bytes of tensors on a machine whose allocator counts nothing: what CUDA's counters say, for a CPU.

Every storage that an operation returns counts from then until it is freed. Buffers inside kernels and the caching
allocator's rounding don't.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):
    """Counts while it is active; tensors that existed before count once an operation touches them.

    Attributes:
        now_bytes: alive.
        peak_bytes: most that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what went in and came out."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # noqa: SLF001 (a storage has no other identity)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key)
