from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import MemoryPlanError
from dflash.model.layout import DrafterConfig, trainable_parameters
from dflash.train.config import DrafterChoices, LossConfig, ReplayConfig, TrainConfig
from dflash.train.memory import (
    TargetShape,
    feature_bytes_per_token,
    optimizer_bytes,
    plan_memory,
    plan_storage,
    seen_by_device,
)
from dflash.train.savings import check_host_memory, check_memory

TARGET = TargetShape(num_parameters=27_000_000_000, hidden_size=5120, intermediate_size=17408)


@pytest.fixture
def network() -> DrafterConfig:
    """The drafter of Qwen3.6-27B."""
    return DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        rope_theta=1e7,
        max_position_embeddings=262144,
        block_size=16,
        mask_token_id=248070,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        sliding_window=2048,
    )


def test_the_known_numbers_come_out(network: DrafterConfig) -> None:
    assert trainable_parameters(network) / 1e9 == pytest.approx(1.730, abs=0.0005)
    assert optimizer_bytes(network) / 1e9 == pytest.approx(27.7, abs=0.05)
    assert feature_bytes_per_token(network) == 51_200
    storage = plan_storage(TrainConfig(pack_tokens=4096), network, TARGET, 902_000, 2000)
    assert storage.offline_bytes / 1e12 == pytest.approx(90, rel=0.05)
    assert storage.online_bytes / 2**20 == 200
    plan = plan_memory(TrainConfig(accumulation=2), network, TARGET)
    drafter = sum(plan.parts[name] for name in ("drafter weights", "gradients", "optimizer"))
    assert drafter == optimizer_bytes(network)
    whole = plan_memory(TrainConfig(loss=LossConfig(chunk_blocks=512)), network, TARGET).parts["logits chunk"]
    assert whole / 6 * 4 / 1e9 == pytest.approx(7.63, abs=0.01)


def test_kept_features_count_where_they_lie(network: DrafterConfig) -> None:
    config = TrainConfig(replay=ReplayConfig(max_bytes=7_000_000_000))
    on_gpu, on_cpu = (plan_memory(seen_by_device(config, on_gpu=on_gpu), network, TARGET) for on_gpu in (True, False))
    assert (on_gpu.parts["replay"], on_cpu.parts["replay"]) == (0, 7_000_000_000)
    check_host_memory(config.replay.max_bytes, 7_000_000_000)
    with pytest.raises(MemoryPlanError, match=r"7\.0 GB of kept features .* 5\.5 GB is free\. Lower .* by 1\.5 GB"):
        check_host_memory(config.replay.max_bytes, 5_500_000_000)


def test_a_fitting_plan_is_returned(network: DrafterConfig) -> None:
    plan = check_memory(TrainConfig(), network, TARGET, 190_000_000_000)
    assert 80e9 < plan.total_bytes < 190e9
    assert sum(plan.parts.values()) == plan.total_bytes


def test_a_device_too_small_is_told_what_to_change_by_how_much(network: DrafterConfig) -> None:
    config = TrainConfig(loss=LossConfig(chunk_blocks=256))
    need = plan_memory(config, network, TARGET).total_bytes
    with pytest.raises(MemoryPlanError) as caught:
        check_memory(config, network, TARGET, need - 500_000_000)
    message = str(caught.value)
    for part in (
        "target weights 54.0 GB",
        "loss.chunk_blocks 256 -> 128",
        "saves",
        "and fits",
        "num_anchors 512 -> 256",
    ):
        assert part in message
    assert "sharding" not in message
    with pytest.raises(MemoryPlanError, match=r"sharding replicate -> fsdp saves 1[0-9]\.[0-9] GB and fits"):
        check_memory(config, network, TARGET, need - 15_000_000_000, world_size=8)
    with pytest.raises(MemoryPlanError, match="recompute false -> true") as caught:
        check_memory(config, network, TARGET, 40_000_000_000)
    assert "and fits" not in str(caught.value)


CHANGES: list[dict[str, Any]] = [
    {"num_anchors": 256},
    {"pack_tokens": 4096},
    {"recompute": True},
    {"loss": LossConfig(chunk_blocks=16)},
    {"loss_vocab_size": 32768},
]


@given(st.lists(st.sampled_from(range(len(CHANGES))), unique=True, min_size=1))
def test_each_change_only_saves(chosen: list[int]) -> None:
    config = TrainConfig(drafter=DrafterChoices(), num_anchors=512)
    network = DrafterConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=150_000,
        rope_theta=1e6,
        max_position_embeddings=32768,
        block_size=16,
        mask_token_id=5,
        target_layer_ids=(1, 5),
        num_target_layers=8,
        layer_types=("full_attention",) * 3,
    )
    first = before = plan_memory(config, network, TARGET).total_bytes
    for index in chosen:
        config = config.model_copy(update=CHANGES[index])
        after = plan_memory(config, network, TARGET).total_bytes
        assert after <= before
        before = after
    assert before < first


def test_gradients_and_activations_are_there_together_only_with_accumulation(network: DrafterConfig) -> None:
    once, twice = (plan_memory(TrainConfig(accumulation=count), network, TARGET) for count in (1, 2))
    assert once.peak == twice.peak == "backward pass"
    assert twice.total_bytes - once.total_bytes == 4 * trainable_parameters(network)
    few = plan_memory(TrainConfig(num_anchors=32, pack_tokens=512), network, TARGET)
    assert few.peak == "update"
    assert few.parts["gradients"] == 4 * trainable_parameters(network)
    assert "features" not in few.parts


def test_a_combination_is_named_where_no_single_change_is_enough(network: DrafterConfig) -> None:
    config = TrainConfig(num_anchors=4096, pack_tokens=65_536)
    with pytest.raises(MemoryPlanError, match=r"no single change is enough, but recompute .*, then num_an.*its") as hit:
        check_memory(config, network, TARGET, 100_000_000_000)
    assert str(hit.value).count("and fits") == 1
