"""What a topology needs, what each of its ranks holds, and which one a plan recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash.train.config import LossConfig, ReplayConfig, TrainConfig
from dflash.train.cost import cost_of_pack, topologies
from dflash.train.memory import TargetShape, plan_memory
from dflash.train.plan import Amount, PlanRun, RunPlan, advice, plan_run, plan_table
from dflash.train.preflight import drafter_config
from dflash.train.run import TrainRun
from dflash.train.topology import TopologyConfig
from flows.parameters import load_parameters

RECIPE = Path(__file__).parents[2] / "deployments" / "runs" / "qwen3.6-27b.toml"
SERVER: dict[str, Any] = {"mode": "server", "server_url": "http://127.0.0.1:8000", "server_folder": "/states"}


def plan(device_gb: float, **topology: Any) -> RunPlan:
    run = load_parameters(PlanRun, RECIPE, [], {})
    train = run.train.model_copy(update={"topology": TopologyConfig(**topology)})
    return plan_run(run.model_copy(update={"train": train}), Amount(1000, 100), round(device_gb * 1e9))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"mode": "server"}, "server_url"),
        ({"server_url": "http://x"}, "server_url"),
        ({"mode": "server", "server_url": "file:///etc", "server_folder": "x"}, "address"),
        ({**SERVER, "server_url": "http://user:hidden@host"}, "no user, password or query"),
        ({**SERVER, "server_url": "http://host:99999"}, "(?i)port"),
        ({"target_ranks": 2}, "mode split"),
        ({"mode": "split", "shard_target": True}, "at least 2 target_ranks"),
        ({"mode": "split", "target_ranks": 4, "shard_target": True, "queue_packs": 2}, "queue_packs x"),
        ({"mode": "split", "target_ranks": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(topology: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TopologyConfig(**topology)


def test_a_run_needs_the_ranks_of_its_topology() -> None:
    split = TrainConfig(topology=TopologyConfig(mode="split", target_ranks=6, drafter_ranks=2))
    values: dict[str, Any] = {"dataset": "d", "target": "t", "output": "o", "train": split}
    with pytest.raises(ValidationError, match=r"num_processes is 1, but train\.topology needs 8"):
        TrainRun(**values)
    assert TrainRun(**values, num_processes=8).train.topology.roles == ("target", "drafter")
    for wrong in ({"replay": ReplayConfig(max_bytes=10)}, {"warm_start": True}):
        with pytest.raises(ValidationError, match="colocated"):
            TrainConfig(topology=split.topology, **wrong)
    with pytest.raises(ValidationError, match="final states"):
        TrainConfig(topology=TopologyConfig(**SERVER), loss=LossConfig(objective="kl"))


@given(targets=st.integers(1, 9), drafters=st.integers(1, 9), accumulation=st.integers(1, 4), first=st.integers(0, 999))
def test_the_default_queue_keeps_all_target_ranks_at_work(
    targets: int, drafters: int, accumulation: int, first: int
) -> None:
    topology = TopologyConfig(mode="split", target_ranks=targets, drafter_ranks=drafters)
    asked = drafters * (accumulation + topology.lookahead(accumulation))
    assert asked >= 2 * targets
    assert {topology.target_of(first + place) for place in range(asked)} == set(range(targets))


def test_a_plan_recommends_the_fastest_topology_that_fits() -> None:
    large, small = plan(141), plan(80)
    assert large.topologies[0].mode == "colocated"
    assert large.topologies[0].speed == pytest.approx(1.0)
    best = small.topologies[0]
    assert (best.mode, best.target_ranks, best.drafter_ranks, best.fits) == ("split", 6, 2, True)
    assert best.speed > 0.95
    assert "split, 6 target and 2 drafter ranks" in " ".join(advice(small))
    assert "too large: colocated" in dict(plan_table(small, Amount(1, 1)))["best topology"]
    assert "none fits" in dict(plan_table(plan(10), Amount(1, 1)))["best topology"]
    assert all(one.speed <= 1 + 1e-9 for one in large.topologies)


def test_each_role_is_planned_by_what_it_holds() -> None:
    found = plan(141, mode="split", target_ranks=6, drafter_ranks=2)
    target, drafter = found.roles["target"], found.roles["drafter"]
    assert target.parts["target weights"] == 2 * 26_900_000_000
    assert "optimizer" not in target.parts
    assert "target weights" not in drafter.parts
    assert drafter.parts["target's embedding and head"] == pytest.approx(5.1e9, rel=0.01)
    assert found.memory == max(target, drafter, key=lambda one: one.total_bytes)
    spread = plan(141, mode="split", target_ranks=6, drafter_ranks=2, shard_target=True)
    assert spread.roles["target"].total_bytes < target.total_bytes - 35e9
    assert "topology.shard_target false -> true" in " ".join(
        advice(plan(50, mode="split", target_ranks=6, drafter_ranks=2))
    )
    assert plan(141, **SERVER).roles.keys() == {"drafter"}


def test_operations_are_counted_as_by_hand() -> None:
    """Of the production pair: 2 x 24.4 B x 62/64 x 8192 for the target; the drafter's blocks dominate its own."""
    run = load_parameters(PlanRun, RECIPE, [], {})
    assert run.target_shape is not None
    network = drafter_config(run.train, run.target_shape)
    shape = TargetShape(run.target_shape.num_parameters, 5120, 17408)
    cost = cost_of_pack(run.train, network, shape)
    assert cost.target_flops == pytest.approx(2 * (26.9e9 - 2 * 248320 * 5120) * 62 / 64 * 8192, rel=1e-6)
    blocks, slots = 512 * 16, 512 * 15
    assert cost.drafter_flops == pytest.approx(6 * 1.6e9 * blocks + 4 * slots * 5120 * 248320, rel=0.15)
    fast, slow = topologies(run.train, network, shape, 2, None)
    assert fast.speed > slow.speed
    assert plan_memory(run.train, network, shape).total_bytes == fast.bytes_of_role["colocated"]
