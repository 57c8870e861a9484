from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from dflash.errors import ModelError, UsageError
from dflash.model.drafter import Drafter
from dflash.model.layout import DrafterConfig, default_target_layer_ids, tensor_shapes, trainable_parameters

Make = Callable[..., DrafterConfig]


def qwen36_drafter() -> DrafterConfig:
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
        eos_token_id=248044,
        pad_token_id=248044,
    )


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 1, (15,)),
        (64, 2, (1, 61)),
    ],
)
def test_default_layer_ids(num_layers: int, num_features: int, expected: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, num_features) == expected


@given(st.integers(2, 8), st.integers(1, 128))
def test_default_layer_ids_ascend_to_three_below_the_end(num_features: int, num_layers: int) -> None:
    try:
        ids = default_target_layer_ids(num_layers, num_features)
    except UsageError:
        assert num_layers - 3 < num_features  # only a target with fewer usable layers than features
        return
    assert list(ids) == sorted(set(ids))
    assert (ids[0], ids[-1]) == (1, num_layers - 3)


def test_no_features_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one feature"):
        default_target_layer_ids(10, 0)


def test_qwen36_drafter_has_58_tensors_and_1_730_billion_parameters() -> None:
    config = qwen36_drafter()
    with torch.device("meta"):
        drafter = Drafter(config)
    found = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert found == tensor_shapes(config)
    assert len(found) == 58
    assert round(trainable_parameters(config) / 1e9, 3) == 1.730
    assert trainable_parameters(config) == sum(parameter.numel() for parameter in drafter.parameters())
    assert found["fc.weight"] == (5120, 25600)
    assert found["layers.4.self_attn.k_proj.weight"] == (1024, 5120)


def test_the_official_config_of_the_qwen36_drafter() -> None:
    official = qwen36_drafter().to_official()
    assert official["architectures"] == ["DFlashDraftModel"]
    assert official["model_type"] == "qwen3"
    assert official["dflash_config"] == {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
    assert official["rope_theta"] == official["rope_parameters"]["rope_theta"] == 1e7
    assert official["use_sliding_window"] is True
    assert official["layer_types"] == ["sliding_attention"] * 4 + ["full_attention"]
    read = Qwen3Config(**{key: value for key, value in official.items() if key not in {"architectures", "dtype"}})
    assert (read.sliding_window, read.head_dim, read.rope_parameters["rope_theta"]) == (2048, 128, 1e7)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    num_layers, num_target = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    kind = st.sampled_from(["sliding_attention", "full_attention"])
    types = draw(st.lists(kind, min_size=num_layers, max_size=num_layers))
    token = st.integers(0, 9)
    groups = draw(st.integers(1, 4))
    ids = draw(st.sets(st.integers(0, num_target - 1), min_size=1, max_size=5))
    return {
        "num_hidden_layers": num_layers,
        "layer_types": types,
        "sliding_window": draw(st.integers(1, 4096)) if "sliding_attention" in types else None,
        "num_target_layers": num_target,
        "target_layer_ids": sorted(ids),
        "num_attention_heads": groups * 2,
        "num_key_value_heads": groups,
        "rope_theta": draw(st.sampled_from([1e4, 1e6, 1e7, 5e5])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "block_size": draw(st.integers(2, 32)),
        "tie_word_embeddings": draw(st.booleans()),
        "eos_token_id": draw(st.one_of(st.none(), token, st.lists(token, min_size=1, max_size=3))),
    }


@settings(max_examples=60, deadline=None)
@given(configs())
def test_official_config_round_trips(tiny_config: Make, choices: dict[str, Any]) -> None:
    config = tiny_config(**choices)
    assert DrafterConfig.from_official(json.loads(json.dumps(config.to_official()))) == config


def test_a_config_without_layer_types_is_all_full_attention(tiny_config: Make) -> None:
    official = tiny_config().to_official() | {"use_sliding_window": False}
    del official["layer_types"]
    assert DrafterConfig.from_official(official).layer_types == ("full_attention", "full_attention")


def test_block_size_inside_dflash_config_is_read(tiny_config: Make) -> None:
    official = tiny_config().to_official()
    official["dflash_config"]["block_size"] = official.pop("block_size")
    assert DrafterConfig.from_official(official) == tiny_config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"dflash_config": {}}, "mask_token_id"),
        ({"num_target_layers": 2}, "target_layer_ids must ascend within 0..1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": None, "num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"dflash_config": "x"}, "expected an object at dflash_config"),
    ],
)
def test_a_config_of_another_network_is_refused(tiny_config: Make, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DrafterConfig.from_official(tiny_config().to_official() | change)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 7}, "even"),
        ({"mask_token_id": 50}, "no row"),
        ({"target_layer_ids": (2, 0)}, "ascend"),
        ({"target_layer_ids": (0, 4)}, "ascend"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ("full_attention", "full_attention")}, "sliding_window"),
        ({"surprise": 1}, "Extra inputs"),
    ],
)
def test_choices_that_do_not_fit_are_refused(tiny_config: Make, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config(**choices)


def test_for_target_follows_the_target_but_never_its_rotary_tricks() -> None:
    target = Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        eos_token_id=248044,
        pad_token_id=248044,
    )
    config = DrafterConfig.for_target(
        target, mask_token_id=248070, sliding_window=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert config == qwen36_drafter()
    assert "partial_rotary_factor" not in json.dumps(config.to_official())


def test_for_target_says_what_is_wrong(tiny_config: Make) -> None:
    target = Qwen3Config(num_hidden_layers=36)
    with pytest.raises(ModelError, match="mask_token_id"):
        DrafterConfig.for_target(target)
    with pytest.raises(ModelError, match="surprise"):
        DrafterConfig.for_target(target, mask_token_id=3, surprise=1)
    chosen = DrafterConfig.for_target(target, mask_token_id=3, num_target_features=1, num_hidden_layers=1)
    assert (chosen.target_layer_ids, chosen.layer_types) == ((18,), ("full_attention",))
    assert (chosen.num_slots, chosen.num_draft_tokens, chosen.feature_size) == (16, 15, 4096)
