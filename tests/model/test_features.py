from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import ModelError
from dflash.model.features import MAX_PADDING, Target, similar_lengths

LAYERS = (0, 2)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
HYBRID = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}


def make_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def make_qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def make_sliding_mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4))


def make_qwen35_text() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **HYBRID))


def make_qwen35_wrapper() -> Any:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=SIZES | HYBRID, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def make_qwen3_next() -> Any:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **HYBRID, **experts))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": make_llama,
    "qwen3": make_qwen3,
    "mistral": make_sliding_mistral,
    "qwen3.5-text": make_qwen35_text,
    "qwen3.5-wrapper": make_qwen35_wrapper,
    "qwen3-next": make_qwen3_next,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each tiny random target on disk."""
    root = tmp_path_factory.mktemp("targets")
    for index, (name, make) in enumerate(MAKERS.items()):
        torch.manual_seed(index)
        make().save_pretrained(root / name)
    return {name: root / name for name in MAKERS}


@pytest.fixture(scope="module")
def targets(checkpoints: dict[str, Path]) -> dict[str, Target]:
    return {name: Target.load(str(path), LAYERS) for name, path in checkpoints.items()}


def random_ids(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def reference_features(target: Target, ids_S: Tensor) -> Tensor:
    """The same features out of transformers' own list of all hidden states."""
    with torch.no_grad():
        states = target.model(input_ids=ids_S[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)


@pytest.mark.parametrize("name", MAKERS)
def test_features_are_the_outputs_of_the_chosen_layers(targets: dict[str, Target], name: str) -> None:
    target, ids_S = targets[name], random_ids(13)
    found_SF = target.features(ids_S)
    assert found_SF.shape == (13, target.feature_size) == (13, 64)
    torch.testing.assert_close(found_SF, reference_features(target, ids_S), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_single_packed_and_padded_rows_give_the_same_features(targets: dict[str, Target], name: str) -> None:
    target, lengths = targets[name], [7, 1, 13, 12, 70]
    rows = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    single = [target.features(row) for row in rows]
    document_S = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    position_S = torch.cat([torch.arange(length) for length in lengths])
    close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
    for packed_SF in (
        target.features(torch.cat(rows), position_S, document_S),
        target.features(torch.cat(rows), document_S=document_S),
        target.features(torch.cat(rows), position_S),
    ):
        torch.testing.assert_close(packed_SF, torch.cat(single), **close)
    padded_bXF = target.features_padded(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(padded_bXF[row, :length], single[row], **close)
        assert not padded_bXF[row, length:].any()


@pytest.mark.parametrize("name", MAKERS)
def test_final_states_give_the_targets_logits(targets: dict[str, Target], name: str) -> None:
    target, ids_S = targets[name], random_ids(9)
    features_SF, final_SH = target.features_and_final(ids_S)
    torch.testing.assert_close(features_SF, target.features(ids_S))
    with torch.no_grad():
        logits_SV = target.model(input_ids=ids_S[None]).logits[0]
    torch.testing.assert_close(final_SH @ target.head_VH.T, logits_SV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_capture_while_decoding(targets: dict[str, Target], name: str) -> None:
    target, ids_S = targets[name], random_ids(9)
    with torch.inference_mode(), target.capture() as taken:
        with pytest.raises(ModelError, match="no hidden state"):
            taken.features()
        target.model(input_ids=ids_S[None], use_cache=False)
    torch.testing.assert_close(taken.features()[0].clone(), target.features(ids_S), atol=1e-5, rtol=1e-4)


def test_nothing_runs_after_the_last_chosen_layer(targets: dict[str, Target]) -> None:
    ran = []
    decoder = targets["qwen3"].model.get_decoder()
    watched = [("layer 2", decoder.layers[2]), ("layer 3", decoder.layers[3]), ("norm", decoder.norm)]
    watched += [("head", targets["qwen3"].model.lm_head)]
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: ran.append(name))
        for name, module in watched
    ]
    hooks = [len(module._forward_hooks) for module in decoder.modules()]  # transformers' own stay on the module
    targets["qwen3"].features(random_ids(5))
    for handle in handles:
        handle.remove()
    assert ran == ["layer 2"]
    assert [len(module._forward_hooks) for module in decoder.modules()] == hooks


def test_features_can_be_trained_on(targets: dict[str, Target]) -> None:
    features_SF = targets["llama"].features(random_ids(5))
    weight = torch.zeros(64, 3, requires_grad=True)
    (features_SF @ weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, features_SF.sum(dim=0)[:, None].expand(64, 3))
    assert not any(parameter.requires_grad for parameter in targets["llama"].model.parameters())


def test_padding_of_a_packed_row_is_zero(targets: dict[str, Target]) -> None:
    ids_S, document_S = random_ids(8), torch.tensor([0] * 6 + [-1] * 2)
    found_SF = targets["llama"].features(ids_S, document_S=document_S)
    torch.testing.assert_close(found_SF[:6], targets["llama"].features(ids_S[:6]))
    assert not found_SF[6:].any()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_groups_hold_each_document_once_and_little_padding(lengths: list[int]) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    groups = similar_lengths(spans)
    assert sorted(span for group in groups for span in group) == spans
    for group in groups:
        sizes = [end - start for start, end in group]
        assert max(sizes) * len(sizes) * (1 - MAX_PADDING) <= sum(sizes)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 99))
def test_a_neighbour_never_changes_a_document(targets: dict[str, Target], lengths: list[int], seed: int) -> None:
    target, ids_S = targets["qwen3.5-text"], random_ids(sum(lengths), seed)
    document_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    before_SF = target.features(ids_S, document_S=document_S)
    changed_S = torch.where(document_S == 0, ids_S, (ids_S + 1) % 97)
    after_SF = target.features(changed_S, document_S=document_S)
    assert torch.equal(before_SF[document_S == 0], after_SF[document_S == 0])


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("qwen3", False), ("qwen3.5-wrapper", False)])
def test_embedding_and_head(targets: dict[str, Target], name: str, tied: bool) -> None:
    target = targets[name]
    assert target.embedding_VH.shape == target.head_VH.shape == (97, 32)
    assert (target.head_VH.data_ptr() == target.embedding_VH.data_ptr()) is tied
    assert (target.num_layers, target.hidden_size, target.text_config.vocab_size) == (4, 32, 97)


def damage(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """A copy of a checkpoint with some tensors changed."""
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("llama", "layers.3.mlp.up_proj.weight"),
        ("llama", "embed_tokens.weight"),
        ("qwen3", "lm_head.weight"),
        ("qwen3.5-wrapper", "language_model.layers.0.linear_attn.A_log"),
        ("qwen3-next", "layers.1.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_weight_stops_loading(checkpoints: dict[str, Path], tmp_path: Path, name: str, ending: str) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        (found,) = [key for key in tensors if key.endswith(ending)]
        del tensors[found]

    with pytest.raises(ModelError, match=r"lacks [12] of \d+ text weights"):
        Target.load(damage(checkpoints[name], tmp_path, drop), LAYERS)


def test_a_misshaped_weight_stops_loading(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:3].clone()

    with pytest.raises(ModelError, match=r"can't be loaded|text weights"):
        Target.load(damage(checkpoints["qwen3"], tmp_path, cut), LAYERS)


def test_a_missing_vision_weight_does_not_matter(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "visual" in key]:
            del tensors[key]

    assert Target.load(damage(checkpoints["qwen3.5-wrapper"], tmp_path, drop), LAYERS).num_layers == 4


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be loaded"):
        Target.load(str(tmp_path), LAYERS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(ModelError, match="can't be loaded"):
        Target.load(str(tmp_path), LAYERS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded"):
        Target.load(str(tmp_path), LAYERS)


@pytest.mark.parametrize("layer_ids", [(), (2, 1), (1, 1), (-1, 2), (0, 4)])
def test_layer_ids_that_do_not_exist_are_refused(targets: dict[str, Target], layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="ascend"):
        Target(targets["llama"].model, layer_ids)


def test_rows_that_do_not_fit_are_refused(targets: dict[str, Target], checkpoints: dict[str, Path]) -> None:
    target, ids_S = targets["llama"], random_ids(6)
    with pytest.raises(ModelError, match="another target"):
        target.features(torch.tensor([1, 97]))
    with pytest.raises(ModelError, match="count from 0"):
        target.features(ids_S, torch.arange(6) + 1, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ModelError, match="expected documents of shape"):
        target.features(ids_S, document_S=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ModelError, match="lengths from 1 to 3"):
        target.features_padded(ids_S.view(2, 3), [3, 4])
    with pytest.raises(ModelError, match="float16"):
        Target.load(str(checkpoints["llama"]), LAYERS, dtype=torch.float16)


def test_bf16_target(checkpoints: dict[str, Path]) -> None:
    target = Target.load(str(checkpoints["qwen3"]), LAYERS, dtype=torch.bfloat16)
    assert target.features(random_ids(5)).dtype == target.embedding_VH.dtype == torch.bfloat16


@pytest.mark.slow
def test_the_real_small_target() -> None:
    folder = Path(__file__).parents[2] / ".dflash" / "models" / "smollm2"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("SmolLM2 is not built here; `make demo` builds it")
    target = Target.load(str(folder), (1, 8, 14, 20, 27))
    ids_S = torch.arange(100, 164)
    found_SF = target.features(ids_S, document_S=torch.arange(2).repeat_interleave(32))
    with torch.no_grad():
        states = target.model(input_ids=ids_S.view(2, 32), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1] for layer in target.layer_ids], dim=-1).view(64, -1)
    torch.testing.assert_close(found_SF, expected, atol=2e-3, rtol=1e-3)
    assert target.head_VH is target.embedding_VH
