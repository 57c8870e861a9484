"""Distributions at the edges of their settings."""

from __future__ import annotations

import pytest
import torch

from dflash.eval.sampling import Chooser, Sampling


@pytest.mark.parametrize(("temperature", "top_p"), [(5e-324, 1.0), (1e-30, 0.5), (1.0, 5e-324), (1e-300, 1e-300)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_tiny_settings_take_the_likeliest_id(temperature: float, top_p: float, scale: float) -> None:
    logits = scale * torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    sampling = Sampling(temperature, top_p)
    assert torch.allclose(sampling.probabilities(logits), torch.eye(3)[[1, 0]])
    chooser = Chooser(sampling)
    assert [chooser.next_token(row) for row in logits] == [1, 0]
