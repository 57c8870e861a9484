from __future__ import annotations

import pytest
import torch

from dflash.errors import UsageError
from dflash.model.device import choose_device


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {choose_device(name, rank).type for name in ("auto", "cpu") for rank in (0, 3)} == {"cpu"}
    with pytest.raises(UsageError, match=r"'cuda' can't be used by rank 0.*0 GPUs are visible"):
        choose_device("cuda")


def test_each_rank_has_a_gpu_of_its_own_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(name, 1) for name in ("auto", "cuda", "cpu")] == [
        torch.device("cuda", 1),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]
    for name in ("auto", "cuda"):
        with pytest.raises(UsageError, match=r"by rank 2: .*2 GPUs.*lower num_processes"):
            choose_device(name, 2)


@pytest.mark.parametrize("name", ["tpu", "cuda:1", ""])
def test_a_name_that_is_none_of_these_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected cpu, or cuda"):
        choose_device(name)
