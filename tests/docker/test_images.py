"""The images: what the linter says, what they run as, what they hold, and their steps in a clean folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
FINAL_STAGES = {"cpu.Dockerfile": ("s3", "cpu"), "gpu.Dockerfile": ("gpu",)}


def stages(file: Path) -> dict[str, str]:
    """Text of each stage by its name."""
    parts = re.split(r"^FROM (.+) AS (\w+)$", file.read_text(), flags=re.MULTILINE)[1:]
    return {name: f"FROM {base}\n{body}" for base, name, body in zip(*[iter(parts)] * 3, strict=True)}


def test_both_images_are_looked_at() -> None:
    assert [file.name for file in DOCKERFILES] == sorted(FINAL_STAGES)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_linter_finds_nothing(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_final_stages_run_as_a_user_and_hold_no_build_tools(file: Path) -> None:
    found = stages(file)
    for name in FINAL_STAGES[file.name]:
        text = found[name]
        assert re.findall(r"^USER (.+)$", text, flags=re.MULTILINE) == ["10001:10001"]
        assert 'ENTRYPOINT ["entrypoint"]' in text
        while (base := re.match(r"FROM (\w+)\n", text)) is not None:  # what it is built upon
            text = found[base[1]] + text.split("\n", 1)[1]
        packages = re.findall(r"apt-get install ([^&\\]*)", text)
        words = {word for line in packages for word in line.split() if not word.startswith("-")}
        # torch.compile needs a C compiler at run time: the one that is there, and only on the GPU image.
        assert words == ({"gcc", "libc6-dev"} if name == "gpu" else set())


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_bases_are_pinned_and_nothing_secret_is_built_in(file: Path) -> None:
    text = file.read_text()
    (image,) = set(re.findall(r"^ARG PYTHON_IMAGE=(.+)$", text, flags=re.MULTILINE))
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", image)
    assert {base for base in re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE) if base not in stages(file)} == {
        "${PYTHON_IMAGE}"
    }
    assert not re.search(r"(?i)^(ENV|ARG).*(secret|password|token|auth|key)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_health_check_of_a_worker_is_for_its_own_container(file: Path) -> None:
    """Prefect's default is every address."""
    text = file.read_text()
    assert '"--with-healthcheck"' in text
    assert re.findall(r"PREFECT_WORKER_WEBSERVER_HOST=(\S+)", text) == ["127.0.0.1"]


def test_torch_is_the_one_that_ci_runs() -> None:
    (pinned,) = re.findall(r"^torch==(.+)$", (REPOSITORY / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert f"ARG TORCH_VERSION={pinned}\n" in (DOCKER / "gpu.Dockerfile").read_text()


def test_the_check_of_torch_names_what_differs() -> None:
    import torch

    check = [sys.executable, str(DOCKER / "check_torch.py")]
    result = subprocess.run([*check, "0.0.1", "99.9"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "expected torch 0.0.1 with CUDA 99.9" in result.stderr
    version = torch.__version__.partition("+")[0]
    same = subprocess.run([*check, version, str(torch.version.cuda)], capture_output=True, text=True, check=False)
    assert (same.returncode, same.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("image", ["cpu", "gpu", "s3"])
def test_the_steps_of_an_image_pass_in_a_clean_folder(image: str) -> None:
    result = subprocess.run(
        ["sh", DOCKER / "check_steps.sh", image],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert f"== {image}: all steps passed" in result.stdout


def test_the_steps_of_no_image_are_refused() -> None:
    result = subprocess.run(["sh", DOCKER / "check_steps.sh", "tpu"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "expected cpu, gpu or s3, found tpu" in result.stderr
