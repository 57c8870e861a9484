"""A step: what isn't finite, what doesn't fit, and the losses that it has always had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.data.batches import LocalShards
from dflash.data.row_reader import Row
from dflash.errors import TrainingError
from dflash.model.drafter import Drafter
from dflash.train import loop
from dflash.train.checkpoint import load
from dflash.train.config import LossConfig
from dflash.train.curves import read_metrics
from dflash.train.engine import _SCALARS, Engine
from dflash.train.loop import Run
from dflash.train.optim import scale_and_clip
from dflash.train.world import World
from tests.train.conftest import TinyTarget, config, write_rows

MakeDrafter = Callable[[], Drafter]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LossConfig(), [8.7724, 9.0465, 11.2428, 9.5596, 8.7108]),
        (LossConfig(weighting="d_pace"), [12.2336, 12.1321, 13.4916, 12.0645, 10.1068]),
        (LossConfig(objective="kl"), [8.4246, 8.4152, 9.9162, 8.4318, 8.9166]),
    ],
    ids=["cross_entropy", "d_pace", "kl"],
)
def test_a_change_that_is_not_about_computation_leaves_the_losses(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards, loss: LossConfig, expected: list[float]
) -> None:
    """Order, anchors, masks, loss and update, all at once: change these figures only with a reason."""
    Run(config(max_steps=5, loss=loss), target, make_drafter(), source, tmp_path).train()
    assert [row["loss"] for row in read_metrics(tmp_path)] == pytest.approx(expected, rel=1e-3)


def test_a_bad_row_changes_nothing_for_the_others_of_its_pack(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    run = Run(config(num_anchors=100), target, make_drafter(), source, tmp_path)
    packs = loop.BatchOrder(0, 60, num_epochs=1).packs(source)
    pack = max(packs, key=lambda pack: len(pack.rows))
    rare = {int(token) for token in pack.rows[0].input_ids}
    rare -= {int(token) for row in pack.rows[1:] for token in row.input_ids}

    def gradients(rows: tuple[Row, ...]) -> tuple[float, dict[str, torch.Tensor]]:
        sums = run.engine._accumulate([replace(pack, rows=rows)], "fresh")
        grads = {
            name: weight.grad.clone()
            for name, weight in run.engine.drafter.named_parameters()
            if weight.grad is not None
        }
        run.engine.optimizer.zero_grad()
        return sums["skipped_rows"], grads

    expected = gradients(pack.rows[1:])
    target.poison = {rare.pop()}
    found = gradients(pack.rows)
    assert (expected[0], found[0]) == (0, 1)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_final_states_that_are_not_finite_cost_their_own_row_alone(
    tmp_path: Path, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of the row before looks up final states of the bad row, for slots that don't count."""
    good, bad = list(range(1, 10)), list(range(20, 30))
    target = TinyTarget()
    real = target.features_and_final

    def poisoned(ids_S: Tensor, *where: Tensor) -> tuple[Tensor, Tensor]:
        features_SF, final_SH = real(ids_S, *where)
        return features_SF, torch.where((ids_S >= 20)[:, None], torch.nan, final_SH)

    monkeypatch.setattr(target, "features_and_final", poisoned)
    shard = LocalShards.scan([write_rows(tmp_path / "shard.arrow", [good, bad])])
    run = Run(config(num_anchors=100, loss=LossConfig(objective="kl")), target, make_drafter(), shard, tmp_path)
    pack = next(loop.BatchOrder(0, 60, num_epochs=1).packs(shard))
    rows = sorted(pack.rows, key=lambda row: row.key)

    def step_of(chosen: list[Row]) -> tuple[float, float | None]:
        sums = run.engine._accumulate([replace(pack, rows=tuple(chosen))], "fresh")
        norm = scale_and_clip(run.engine.drafter.parameters(), sums["weight"], 1e9)
        run.engine.optimizer.zero_grad()
        return sums["skipped_rows"], float(norm)

    alone, both = step_of(rows[:1]), step_of(rows)
    assert (alone[0], both[0]) == (0, 1)
    assert both[1] == pytest.approx(alone[1], rel=1e-4)


def test_a_non_finite_gradient_skips_the_step(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    drafter = make_drafter()
    run = Run(config(num_epochs=1, max_skipped_rows=1000), target, drafter, source, tmp_path)
    drafter.norm.weight.register_hook(lambda grad: grad * float("inf"))
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    result = run.train()
    assert result.skipped_rows == 12
    assert all(torch.equal(before[name], value) for name, value in load(result.checkpoint).weights.items())


def test_out_of_memory_halves_packs_once_then_stops(
    tmp_path: Path,
    target: Any,
    make_drafter: MakeDrafter,
    source: LocalShards,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target.out_of_memory_above = 30
    halved = Run(config(num_epochs=1), target, make_drafter(), source, tmp_path / "half").train()
    assert halved.halved
    assert [record.levelname for record in caplog.records if "in two halves" in record.message] == ["WARNING"]
    assert any(row["halved"] for row in read_metrics(tmp_path / "half"))
    assert Run(config(num_epochs=2), target, make_drafter(), source, tmp_path / "half").engine.halved
    target.out_of_memory_above = 10
    with pytest.raises(TrainingError, match=r"halved already.*dflash plan"):
        Run(config(num_epochs=1), target, make_drafter(), source, tmp_path / "never").train()


def test_a_halved_step_has_as_many_blocks_as_before_in_halves(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(config(num_anchors=8), target, make_drafter(), source, tmp_path)
    pack = max(loop.BatchOrder(0, 60, num_epochs=1).packs(source), key=lambda pack: pack.num_tokens)
    blocks: list[int] = []
    real = run.engine._draft

    def draft(packed: Any, anchor_N: torch.Tensor, features_SF: torch.Tensor) -> Any:
        blocks.append(len(anchor_N))
        return real(packed, anchor_N, features_SF)

    monkeypatch.setattr(Engine, "_draft", lambda _, *given: draft(*given))
    run.engine._accumulate([pack], "fresh")
    run.engine.halved = True
    run.engine._accumulate([pack], "fresh")
    assert blocks == [8, 4, 4]


def test_all_ranks_halve_their_packs_when_one_had_to(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    class BesideHalvedRank(World):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            values[_SCALARS.index("halved")] += 1
            return values

    run = Run(config(num_epochs=1), target, make_drafter(), source, tmp_path)
    run.engine.world = BesideHalvedRank()
    pack = next(loop.BatchOrder(0, 60, num_epochs=1).packs(source))
    run.engine.step([pack], "fresh", 0.5)
    assert run.engine.halved
