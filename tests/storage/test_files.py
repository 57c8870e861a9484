"""Digests of files taken at once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import StorageError
from dflash.storage import files
from dflash.storage.files import files_md5

EDGES = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 4096]  # around blocks of 64 bytes and their padding


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("is_native", [True, False])
def test_md5_of_files_is_hashlibs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    if is_native:
        pytest.importorskip("dflash.storage._md5_lanes", reason="no compiler when the package was installed")
    else:
        monkeypatch.setattr(files, "_md5_lanes", None)
    paths = [tmp_path / str(size) for size in EDGES]
    for path in paths:
        path.write_bytes(bytes(range(256)) * 16 if path.name == "4096" else b"x" * int(path.name))
    assert files_md5(paths) == [_md5(path.read_bytes()) for path in paths]
    assert files_md5([]) == []
    with pytest.raises(StorageError, match="missing"):
        files_md5([paths[0], tmp_path / "missing"])


@given(sizes=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 5000)), max_size=40), seed=st.binary(min_size=1))
def test_md5_of_any_number_of_buffers_of_any_size(sizes: list[int], seed: bytes) -> None:
    lanes = pytest.importorskip("dflash.storage._md5_lanes", reason="no compiler when the package was installed")
    buffers = [(bytes([number % 251]) + seed) * (size // (len(seed) + 1) + 1) for number, size in enumerate(sizes)]
    buffers = [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    assert [digest.hex() for digest in lanes.md5_of_each(buffers)] == [_md5(buffer) for buffer in buffers]


def test_what_is_no_buffer_is_refused() -> None:
    lanes = pytest.importorskip("dflash.storage._md5_lanes", reason="no compiler when the package was installed")
    for wrong in (None, [b"a", "text"], [b"a", None]):
        with pytest.raises(TypeError):
            lanes.md5_of_each(wrong)
