from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from dflash.errors import ModelError
from embedded.build_once import build_once

NAMES = ("a", "b")


def _write(out: Path) -> None:
    for name in NAMES:
        (out / name).write_text(name)


def _write_slowly(out: Path) -> None:
    _write(out)
    time.sleep(0.3)


def _build_in_process(directory: Path) -> None:
    build_once(directory, NAMES, _write_slowly)


def test_builds_and_makes_the_parents(tmp_path: Path) -> None:
    directory = tmp_path / "x" / "y"
    assert build_once(directory, NAMES, _write) == directory
    assert sorted(path.name for path in directory.iterdir()) == ["a", "b"]
    assert [path.name for path in directory.parent.iterdir()] == ["y"]


def test_the_second_call_builds_nothing(tmp_path: Path) -> None:
    def explode(out: Path) -> None:
        pytest.fail(f"built again in {out}")

    build_once(tmp_path / "d", NAMES, _write)
    build_once(tmp_path / "d", NAMES, explode)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "a").write_text("half")
        raise ModelError("stopped half-way")

    with pytest.raises(ModelError, match="half-way"):
        build_once(tmp_path / "d", NAMES, fail)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_get_one_whole_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=_build_in_process, args=(tmp_path / "d",)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert (tmp_path / "d" / "b").read_text() == "b"


def test_loses_the_race_gracefully(tmp_path: Path) -> None:
    directory = tmp_path / "d"

    def overtaken(out: Path) -> None:
        _write(out)
        build_once(directory, NAMES, _write)
        (out / "a").write_text("mine")

    build_once(directory, NAMES, overtaken)
    assert (directory / "a").read_text() == "a"


def test_fills_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    build_once(tmp_path / "d", NAMES, _write)
    assert (tmp_path / "d" / "a").is_file()


def test_leaves_a_directory_with_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").write_text("keep")
    with pytest.raises(ModelError, match=r"found \['mine'\]"):
        build_once(tmp_path / "d", NAMES, _write)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]


def test_refuses_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("keep")
    with pytest.raises(ModelError, match="found a file"):
        build_once(tmp_path / "d", NAMES, _write)
