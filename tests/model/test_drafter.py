from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

from dflash.errors import ModelError
from dflash.model.attention import Backend, BlockLayout
from dflash.model.drafter import DraftCache, Drafter, block_embeddings
from dflash.model.layout import DrafterConfig

Make = Callable[..., DrafterConfig]
MakeLayout = Callable[[list[int], list[int]], BlockLayout]

documents = st.lists(st.integers(1, 12), min_size=1, max_size=4)
anchor_seeds = st.lists(st.integers(0, 10_000), min_size=1, max_size=5)


def make_drafter(config: DrafterConfig, attention: Backend = "sdpa", *, recompute: bool = False) -> Drafter:
    drafter = Drafter(config, attention, recompute=recompute)
    # A wide spread makes every path through the network matter, norms included.
    drafter.initialize(torch.Generator().manual_seed(0), std=0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


def random_row(config: DrafterConfig, num_tokens: int, anchor_N: Tensor) -> tuple[Tensor, Tensor]:
    """Features [S, K * H] and block embeddings [N, B, H]."""
    generator = torch.Generator().manual_seed(num_tokens)
    features_SF = torch.randn(num_tokens, config.feature_size, generator=generator)
    weight_VH = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    ids_S = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)
    return features_SF, block_embeddings(weight_VH, ids_S, anchor_N, config)


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
@settings(max_examples=20, deadline=None)
@given(lengths=documents, seeds=anchor_seeds, window=st.integers(1, 15))
def test_nothing_leaks_into_a_block(
    tiny_config: Make, packed_layout: MakeLayout, backend: Backend, lengths: list[int], seeds: list[int], window: int
) -> None:
    """Features at or after the anchor, of other documents, and other blocks leave a block's hidden states unchanged."""
    config = tiny_config(sliding_window=window)
    drafter = make_drafter(config, backend)
    layout = packed_layout(lengths, [seed % sum(lengths) for seed in seeds])
    features_SF, embeddings_NBH = random_row(config, sum(lengths), layout.anchor_N)
    features_SF.requires_grad_()
    embeddings_NBH.requires_grad_()
    hidden_NBH = drafter(features_SF, embeddings_NBH, layout)
    for block, anchor in enumerate(layout.anchor_N.tolist()):
        weights = torch.randn(hidden_NBH[block].shape, generator=torch.Generator().manual_seed(block))
        loss = (hidden_NBH[block] * weights).sum()
        by_feature, by_block = torch.autograd.grad(loss, (features_SF, embeddings_NBH), retain_graph=True)
        row = torch.arange(sum(lengths))
        allowed_S = (row < anchor) & (layout.document_S == layout.document_S[anchor])
        assert torch.equal(by_feature.abs().sum(dim=1) > 0, allowed_S)  # the last layer is full: all of these matter
        assert (by_block.abs().sum(dim=(1, 2)) > 0).nonzero().flatten().tolist() == [block]


def test_a_sliding_drafter_sees_no_further_than_its_window(tiny_config: Make) -> None:
    config = tiny_config(layer_types=("sliding_attention",), num_hidden_layers=1, sliding_window=3)
    drafter = make_drafter(config)
    layout = BlockLayout.single(torch.tensor([8]), 12)
    features_SF, embeddings_NBH = random_row(config, 12, layout.anchor_N)
    features_SF.requires_grad_()
    embeddings_NBH.requires_grad_()
    hidden_NBH = drafter(features_SF, embeddings_NBH, layout)
    for slot, (context, slots) in enumerate([([6, 7], [0]), ([7], [0, 1]), ([], [0, 1, 2]), ([], [1, 2, 3])]):
        loss = (hidden_NBH[0, slot] ** 3).sum()
        by_feature, by_slot = torch.autograd.grad(loss, (features_SF, embeddings_NBH), retain_graph=True)
        assert by_feature.abs().sum(dim=1).nonzero().flatten().tolist() == context
        assert by_slot[0].abs().sum(dim=1).nonzero().flatten().tolist() == slots


@settings(max_examples=20, deadline=None)
@given(lengths=documents, seeds=anchor_seeds, window=st.integers(1, 15), cut=st.integers(0, 12))
def test_a_training_block_equals_the_decode_path(
    tiny_config: Make, packed_layout: MakeLayout, lengths: list[int], seeds: list[int], window: int, cut: int
) -> None:
    config = tiny_config(sliding_window=window)
    drafter = make_drafter(config)
    layout = packed_layout(lengths, [seed % sum(lengths) for seed in seeds])
    features_SF, embeddings_NBH = random_row(config, sum(lengths), layout.anchor_N)
    trained_NBH = drafter(features_SF, embeddings_NBH, layout)
    for block, anchor in enumerate(layout.anchor_N.tolist()):
        position = int(layout.position_S[anchor])
        own_SF = features_SF[anchor - position : anchor]
        cache = DraftCache(drafter)
        for part in (own_SF[:cut], own_SF[cut:]):  # features arrive in rounds
            cache.extend(part)
        decoded_BH = cache.draft(embeddings_NBH[block : block + 1], position)
        torch.testing.assert_close(decoded_BH, trained_NBH[block], atol=2e-5, rtol=1e-4)


def test_the_cache_hides_the_anchor_and_forgets_what_is_cropped(tiny_config: Make) -> None:
    config = tiny_config()
    drafter = make_drafter(config)
    features_SF, embeddings_1BH = random_row(config, 12, torch.tensor([6]))
    cache = DraftCache(drafter)
    cache.extend(features_SF[:6])
    expected_BH = cache.draft(embeddings_1BH, 6)
    cache.extend(features_SF[6:])  # a rejected continuation
    assert len(cache) == 12
    torch.testing.assert_close(cache.draft(embeddings_1BH, 6), expected_BH)
    cache.crop(4)
    with pytest.raises(ModelError, match="needs the features of 6 tokens, the cache holds 4"):
        cache.draft(embeddings_1BH, 6)
    cache.extend(features_SF[4:6])
    torch.testing.assert_close(cache.draft(embeddings_1BH, 6), expected_BH)
    with pytest.raises(ModelError, match="can't crop"):
        cache.crop(7)
    with pytest.raises(ModelError, match="expected features"):
        cache.extend(features_SF[:, :3])


def test_a_block_without_context_decodes(tiny_config: Make) -> None:
    config = tiny_config()
    drafter = make_drafter(config)
    features_SF, embeddings_1BH = random_row(config, 3, torch.tensor([0]))
    trained_1BH = drafter(features_SF, embeddings_1BH, BlockLayout.single(torch.tensor([0]), 3))
    torch.testing.assert_close(DraftCache(drafter).draft(embeddings_1BH, 0), trained_1BH[0])


def test_without_context_the_layers_are_those_of_qwen3(tiny_config: Make) -> None:
    """The same weights in transformers' own Qwen3, with a mask that shows everything, give the same hidden states."""
    config = tiny_config(layer_types=("full_attention", "full_attention"), sliding_window=None)
    drafter = make_drafter(config, "sdpa")
    fields = {key: value for key, value in config.transformer_fields().items() if key != "rope_theta"}
    reference = Qwen3Model(Qwen3Config(**fields, attn_implementation="eager")).eval()
    own = {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith(("fc", "hidden_norm"))}
    missing, unexpected = reference.load_state_dict(own, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    features_SF, embeddings_1BH = random_row(config, 40, torch.tensor([30]))
    position = torch.arange(30, 34)[None]
    no_mask = torch.zeros(1, 1, 4, 4)
    with torch.no_grad():
        expected_1BH = reference(inputs_embeds=embeddings_1BH, position_ids=position, attention_mask=no_mask)[0]
        layout = BlockLayout(torch.tensor([30]), torch.arange(40), torch.tensor([0] * 30 + [1] * 10))
        found_1BH = drafter(features_SF, embeddings_1BH, layout)
    torch.testing.assert_close(found_1BH, expected_1BH, atol=2e-5, rtol=1e-4)


def test_recomputing_layers_changes_nothing(tiny_config: Make, packed_layout: MakeLayout) -> None:
    config, layout = tiny_config(), packed_layout([9, 7], [2, 5, 12])
    features_SF, embeddings_NBH = random_row(config, 16, layout.anchor_N)
    gradients = []
    for recompute in (False, True):
        drafter = make_drafter(config, recompute=recompute)
        (drafter(features_SF, embeddings_NBH, layout) ** 2).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])  # type: ignore[arg-type]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients[0].values())


def test_bf16_autocast_stays_near_fp32(tiny_config: Make, packed_layout: MakeLayout) -> None:
    config, layout = tiny_config(), packed_layout([9, 7], [2, 5, 12])
    features_SF, embeddings_NBH = random_row(config, 16, layout.anchor_N)
    drafter = make_drafter(config)
    exact_NBH = drafter(features_SF, embeddings_NBH, layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_NBH = drafter(features_SF.bfloat16(), embeddings_NBH.bfloat16(), layout)
    similarity = torch.nn.functional.cosine_similarity(exact_NBH.flatten(), rounded_NBH.float().flatten(), dim=0)
    assert similarity > 0.99
    rounded_NBH.float().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in drafter.parameters()
    )


def test_inputs_of_a_block(tiny_config: Make) -> None:
    config = tiny_config()
    weight_VH = torch.randn(config.vocab_size, config.hidden_size)
    ids_S = torch.tensor([7, 8, 9])
    found_NBH = block_embeddings(weight_VH, ids_S, torch.tensor([2, 0]), config)
    mask_H = weight_VH[config.mask_token_id]
    for block, token in enumerate((9, 7)):
        assert torch.equal(found_NBH[block], torch.stack([weight_VH[token], mask_H, mask_H, mask_H]))


def test_lengths_that_differ_are_refused(tiny_config: Make) -> None:
    config = tiny_config()
    features_SF, embeddings_NBH = random_row(config, 12, torch.tensor([6]))
    with pytest.raises(ModelError, match="one row for each id"):
        Drafter(config)(features_SF[1:], embeddings_NBH, BlockLayout.single(torch.tensor([6]), 12))
    with pytest.raises(ModelError, match="one block for each anchor"):
        Drafter(config)(features_SF, embeddings_NBH, BlockLayout.single(torch.tensor([6, 7]), 12))


def test_initialization_is_reproducible(tiny_config: Make) -> None:
    first, second = Drafter(tiny_config()), Drafter(tiny_config())
    for drafter in (first, second):
        drafter.initialize(torch.Generator().manual_seed(4))
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert abs(float(first.fc.weight.detach().std()) - 0.02) < 0.002
