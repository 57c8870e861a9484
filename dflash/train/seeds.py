"""Generators seeded by name.

Nothing depends on what was drawn before, so resuming and other numbers of ranks need no generator state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def named_generator(key: str) -> torch.Generator:
    """Return a CPU generator that `key` alone decides."""
    return torch.Generator().manual_seed(_number(key))


def named_numpy_generator(key: str) -> np.random.Generator:
    """Return a numpy generator that `key` alone decides."""
    return np.random.Generator(np.random.PCG64(_number(key)))


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
