from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import ModelError
from dflash.model.attention import BlockLayout
from dflash.model.drafter import Drafter, block_embeddings
from dflash.model.export import ExportOptions, TargetParts, export_drafter, load_drafter, read_config
from dflash.model.layout import DrafterConfig, tensor_shapes
from dflash.model.speculators_layout import Verifier

Make = Callable[..., DrafterConfig]
PEERS = Path(__file__).parents[2] / ".dflash" / "peers" / "speculators"


@pytest.fixture
def drafter(tiny_config: Make) -> Drafter:
    made = Drafter(tiny_config())
    made.initialize(torch.Generator().manual_seed(0), std=0.3)
    return made


@pytest.fixture
def target_parts(tiny_config: Make) -> TargetParts:
    config = tiny_config()
    weight_VH = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(1))
    verifier = Verifier(name_or_path="someone/target", architectures=("LlamaForCausalLM",))
    return TargetParts(verifier, weight_VH, weight_VH)  # tied


def options(layout: Any, target: TargetParts, dtype: torch.dtype = torch.bfloat16) -> ExportOptions:
    return ExportOptions(layout, dtype, target, {"README.md": "# A drafter\n"})


@pytest.mark.parametrize("layout", ["sglang", "vllm", "speculators"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_loads_back_as_the_same_drafter(
    drafter: Drafter, target_parts: TargetParts, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    export_drafter(drafter, tmp_path / "out", options(layout, target_parts, dtype))
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == drafter.config == read_config(tmp_path / "out")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in loaded.parameters())
    assert (tmp_path / "out" / "README.md").read_text() == "# A drafter\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_official_layout_has_the_drafters_tensors_and_nothing_else(
    drafter: Drafter, target_parts: TargetParts, tmp_path: Path
) -> None:
    export_drafter(drafter, tmp_path / "sglang", options("sglang", target_parts))
    export_drafter(drafter, tmp_path / "vllm", options("vllm", target_parts))
    tensors = load_file(tmp_path / "sglang" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensor_shapes(drafter.config)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert config == drafter.config.to_official("bfloat16")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "sglang" / file).read_bytes() == (tmp_path / "vllm" / file).read_bytes()


def test_the_speculators_layout_ships_embedding_and_head(
    drafter: Drafter, target_parts: TargetParts, tmp_path: Path
) -> None:
    export_drafter(drafter, tmp_path / "out", options("speculators", target_parts, torch.float32))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == {*tensor_shapes(drafter.config), "embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], target_parts.head_VH)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]  # one more than our layers 0 and 2
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_a_drafter_without_its_target_cannot_be_a_speculators_export(drafter: Drafter, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pass the target"):
        export_drafter(drafter, tmp_path / "out", ExportOptions("speculators"))
    foreign = TargetParts(Verifier(name_or_path="a", architectures=()), torch.zeros(3, 32), torch.zeros(50, 32))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: expected shape"):
        export_drafter(drafter, tmp_path / "out", ExportOptions("speculators", target=foreign))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_or_left_half_done(
    drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        export_drafter(drafter, tmp_path / "taken", ExportOptions("vllm"))
    with pytest.raises(ModelError, match="plain name"):
        export_drafter(drafter, tmp_path / "out", ExportOptions("vllm", documents={"../README.md": "x"}))

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dflash.model.export.save_file", full)
        with pytest.raises(ModelError, match="No space left"):
            export_drafter(drafter, tmp_path / "out", ExportOptions("vllm"))

    def other_bytes(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr("dflash.model.export.save_file", other_bytes)
        with pytest.raises(ModelError, match="read back differ"):
            export_drafter(drafter, tmp_path / "out", ExportOptions("vllm"))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_weights_that_are_not_finite_are_not_exported(drafter: Drafter, tmp_path: Path) -> None:
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"fc.weight has values that aren't finite"):
        export_drafter(drafter, tmp_path / "out", ExportOptions("vllm"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), r"1 missing \['norm.weight'\]"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"1 unexpected \['extra'\]"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}), r"fc.weight: expected \(32, 64\), found"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused(
    drafter: Drafter, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    export_drafter(drafter, tmp_path / "out", ExportOptions("sglang"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_drafter(tmp_path / "out")


def test_damaged_files_are_refused(drafter: Drafter, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export_drafter(drafter, folder, ExportOptions("sglang"))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "second.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match="repeats tensors"):
        load_drafter(folder)
    (folder / "second.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="damaged"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_drafter(folder)
    for text, message in (("[]", "expected a JSON object"), ("{", "can't be read")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            load_drafter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"draft_vocab_size": 7}, "draft_vocab_size"),
        ({"aux_hidden_state_layer_ids": ["a"]}, "aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"aux_hidden_state_layer_ids": []}, "target_layer_ids"),
    ],
)
def test_a_speculators_config_of_another_network_is_refused(
    drafter: Drafter, target_parts: TargetParts, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    export_drafter(drafter, tmp_path / "out", options("speculators", target_parts))
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_drafter(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_speculators_own_model_loads_an_export_and_gives_the_same_logits(
    tiny_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    if not PEERS.is_dir():
        pytest.skip("the speculators library is not unpacked here (see benchmarks/train_step.py)")
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    from speculators.models.dflash import DFlashDraftModel

    # Its sliding window counts from the anchor for all slots, ours from each slot as servers do. A window longer than
    # the documents makes them the same network; the sliding layer's causality inside the block remains to compare.
    config = tiny_config(sliding_window=32)
    drafter = Drafter(config)
    drafter.initialize(torch.Generator().manual_seed(0), std=0.3)
    sizes = {
        key: getattr(config, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    }
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_hidden_layers=4, tie_word_embeddings=tied, initializer_range=0.3)
    )
    target.save_pretrained(tmp_path / "target")
    embed_VH, head_VH = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    parts = TargetParts(
        Verifier(name_or_path=str(tmp_path / "target"), architectures=("LlamaForCausalLM",)), embed_VH, head_VH
    )
    export_drafter(drafter, tmp_path / "out", options("speculators", parts, torch.float32))
    peer = DFlashDraftModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()

    features_SF = torch.randn(20, config.feature_size, generator=torch.Generator().manual_seed(2))
    ids_S = torch.arange(20) + 3
    document_S = torch.tensor([0] * 12 + [1] * 8)
    position_S = torch.cat([torch.arange(12), torch.arange(8)])
    with torch.no_grad():
        hidden, logits, _, _, indices = peer._backbone_forward(
            features_SF[None], ids_S[None], torch.ones(1, 20), torch.zeros(1, 20, 32), document_S[None],
            position_S[None], max_anchors=5,
        )  # fmt: skip
        anchor_N = indices[:: config.block_size]
        layout = BlockLayout(anchor_N, position_S, document_S)
        own_NBH = drafter(features_SF, block_embeddings(embed_VH, ids_S, anchor_N, config), layout)
    torch.testing.assert_close(own_NBH.flatten(0, 1), hidden[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own_NBH.flatten(0, 1) @ head_VH.T, logits[0], atol=1e-3, rtol=1e-4)
