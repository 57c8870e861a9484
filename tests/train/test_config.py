from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from dflash.errors import TrainingError
from dflash.train.config import DrafterChoices, OptimizerConfig, TrainConfig, default_gamma
from dflash.train.environment import difference_table, differences, fingerprint
from dflash.train.optim import learning_rate, make_optimizer, scale_and_clip


@pytest.mark.parametrize(("block", "gamma"), [(4, 4), (8, 4), (10, 5), (13, 6), (16, 7), (32, 7)])
def test_the_papers_decays_are_the_default(block: int, gamma: float) -> None:
    assert default_gamma(block) == pytest.approx(gamma)
    assert TrainConfig().loss.options(block).gamma == pytest.approx(gamma)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_epochs": None}, "no end"),
        ({"replay": {"steps": 2}}, "nothing to replay from"),
        ({"replay": {"max_bytes": 5}, "loss": {"objective": "kl"}}, "final states"),
        ({"pack_token": 5}, "Extra inputs"),
    ],
)
def test_settings_that_can_not_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**fields)


def test_only_chosen_fields_reach_the_network() -> None:
    chosen = DrafterChoices(block_size=8, mask_token_id=16).chosen()
    assert chosen == {"num_hidden_layers": 5, "block_size": 8, "num_target_features": 5, "mask_token_id": 16}


def test_the_rate_warms_up_then_follows_a_cosine() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_share=0.1, final_share=0.2)
    assert learning_rate(0.05, config) == pytest.approx(0.5)
    assert learning_rate(0.1, config) == pytest.approx(1.0)
    assert learning_rate(0.55, config) == pytest.approx(0.6)
    assert learning_rate(1.0, config) == learning_rate(1.5, config) == pytest.approx(0.2)
    assert learning_rate(0.0, OptimizerConfig(warmup_share=0)) == 6e-4


def test_clipping_acts_on_the_norm_of_the_normalised_gradient() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([6.0, 0.0]), torch.tensor([8.0])
    assert float(scale_and_clip(weights, 2.0, 1.0)) == pytest.approx(5.0)
    assert weights[0].grad.tolist() == pytest.approx([0.6, 0.0])
    weights[0].grad, weights[1].grad = torch.tensor([math.inf, 1.0]), torch.tensor([1.0])
    assert not math.isfinite(float(scale_and_clip(weights, 1.0, 1.0)))


def test_masters_must_be_fp32_and_norms_never_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (2, 0.0)]
    with pytest.raises(TrainingError, match="must be float32"):
        make_optimizer(model.bfloat16(), OptimizerConfig())


def test_a_changed_environment_is_laid_out_as_a_table() -> None:
    now = fingerprint()
    assert now["torch"] == torch.__version__.split("+")[0] or now["torch"] == torch.__version__
    assert {"python", "cuda", "transformers", "numpy"} <= set(now)
    assert differences(now, dict(now)) == []
    changes = differences({"torch": "2.9", "cuda": "12.8"}, {"torch": "2.13", "cuda": "12.8", "triton": "3"})
    assert difference_table(changes).split("\n") == [
        "| what   | checkpoint | here |",
        "| ------ | ---------- | ---- |",
        "| torch  | 2.9        | 2.13 |",
        "| triton | absent     | 3    |",
    ]
