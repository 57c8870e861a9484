from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import ModelError
from dflash.model.attention import Attention, Backend, BlockLayout, visible
from dflash.model.layout import DrafterConfig, LayerType

Make = Callable[..., DrafterConfig]
MakeLayout = Callable[[list[int], list[int]], BlockLayout]

# A row of up to four documents and up to six anchors anywhere in it, in any order, some of them twice.
documents = st.lists(st.integers(1, 12), min_size=1, max_size=4)
anchor_seeds = st.lists(st.integers(0, 10_000), min_size=1, max_size=6)


def rows(lengths: list[int], seeds: list[int]) -> list[int]:
    return [seed % sum(lengths) for seed in seeds]


def oracle(lengths: list[int], anchors: list[int], size: int, window: int | None) -> torch.Tensor:
    """Visibility written out token by token from the specification; a window means a sliding layer."""
    where = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    mask = torch.zeros(len(anchors) * size, len(where) + len(anchors) * size, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        document, start = where[anchor]
        for slot in range(size):
            lowest = 0 if window is None else start + slot - (window - 1)
            for row, (other, position) in enumerate(where):
                mask[block * size + slot, row] = other == document and lowest <= position < start
            for other_slot in range(size):
                inside = window is None or (other_slot <= slot and start + other_slot >= lowest)
                mask[block * size + slot, len(where) + block * size + other_slot] = inside
    return mask


@settings(max_examples=60, deadline=None)
@given(documents, anchor_seeds, st.integers(2, 6), st.one_of(st.none(), st.integers(1, 15)))
def test_visibility_is_the_specification(
    packed_layout: MakeLayout, lengths: list[int], seeds: list[int], size: int, window: int | None
) -> None:
    anchors = rows(lengths, seeds)
    layer_type: LayerType = "full_attention" if window is None else "sliding_attention"
    found = visible(packed_layout(lengths, anchors), size, layer_type, window)
    assert torch.equal(found, oracle(lengths, anchors, size, window))


def random_inputs(config: DrafterConfig, layout: BlockLayout, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_queries = layout.anchor_N.numel() * config.block_size
    num_keys = layout.position_S.numel() + num_queries
    return [
        torch.randn(heads, tokens, config.head_dim, generator=generator)
        for heads, tokens in (
            (config.num_attention_heads, num_queries),
            (config.num_key_value_heads, num_keys),
            (config.num_key_value_heads, num_keys),
        )
    ]


def gradients(backend: Backend, config: DrafterConfig, layout: BlockLayout, kind: LayerType) -> list[torch.Tensor]:
    inputs = [tensor.requires_grad_() for tensor in random_inputs(config, layout, 3)]
    out = Attention(layout, config, backend)(kind, *inputs)
    return [out, *torch.autograd.grad((out * out).sum(), inputs)]


@settings(max_examples=25, deadline=None)
@given(documents, anchor_seeds, st.integers(2, 6), st.integers(1, 15), st.sampled_from([1, 8, 64]))
def test_sdpa_equals_the_dense_oracle_in_values_and_gradients(
    tiny_config: Make,
    packed_layout: MakeLayout,
    lengths: list[int],
    seeds: list[int],
    size: int,
    window: int,
    rows_at_once: int,
) -> None:
    config = tiny_config(block_size=size, sliding_window=window)
    layout = packed_layout(lengths, rows(lengths, seeds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.model.attention.CHUNK_ROWS", rows_at_once)
        for kind in config.layer_types:
            pairs = zip(gradients("sdpa", config, layout, kind), gradients("dense", config, layout, kind), strict=True)
            for found, expected in pairs:
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=3, deadline=None)  # each traces the mask anew, about 1 s
@given(documents, anchor_seeds, st.integers(1, 15))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_the_dense_oracle(
    tiny_config: Make, packed_layout: MakeLayout, lengths: list[int], seeds: list[int], window: int
) -> None:
    config = tiny_config(sliding_window=window)
    layout = packed_layout(lengths, rows(lengths, seeds))
    inputs = random_inputs(config, layout, 5)
    for kind in config.layer_types:
        flex, dense = (Attention(layout, config, backend)(kind, *inputs) for backend in ("flex", "dense"))
        torch.testing.assert_close(flex, dense, atol=2e-5, rtol=1e-4)


def test_flex_without_a_backward_pass_says_so(tiny_config: Make, packed_layout: MakeLayout) -> None:
    config, layout = tiny_config(), packed_layout([6], [2, 4])
    inputs = [tensor.requires_grad_() for tensor in random_inputs(config, layout, 5)]
    with pytest.raises(ModelError, match='attention="sdpa"'):
        Attention(layout, config, "flex")("full_attention", *inputs)


@pytest.mark.slow
def test_compiled_flex_does_not_recompile_for_new_anchors_and_lengths(
    tiny_config: Make, packed_layout: MakeLayout
) -> None:
    import torch._dynamo as dynamo

    from dflash.model.attention import _compiled_flex

    config = tiny_config()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own deprecations while it compiles
        for step, (lengths, anchors) in enumerate((([40, 30], [3, 50]), ([41, 30], [9, 60]), ([20, 77], [1, 2]))):
            layout = packed_layout(lengths, anchors)
            query, keys, values = random_inputs(config, layout, step)
            mask = Attention(layout, config, "flex")._masks["sliding_attention"]
            with dynamo.config.patch(error_on_recompile=step > 0):
                found = _compiled_flex()(query[None], keys[None], values[None], block_mask=mask, enable_gqa=True)[0]
            expected = Attention(layout, config, "dense")("sliding_attention", query, keys, values)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_trains_on_a_gpu(tiny_config: Make, packed_layout: MakeLayout) -> None:
    config = tiny_config(head_dim=16)
    for lengths, anchors in (([40, 30], [3, 50, 66]), ([100, 9], [9, 60, 104])):
        layout = packed_layout(lengths, anchors)
        layout = BlockLayout(layout.anchor_N.cuda(), layout.position_S.cuda(), layout.document_S.cuda())
        inputs = [tensor.cuda().requires_grad_() for tensor in random_inputs(config, layout, 7)]
        for kind in config.layer_types:
            results = []
            for backend in ("flex", "dense"):
                out = Attention(layout, config, backend)(kind, *inputs)
                results.append([out, *torch.autograd.grad((out * out).sum(), inputs)])
            for found, expected in zip(*results, strict=True):
                torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match="position"):
        BlockLayout(torch.tensor([0]), torch.arange(3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ModelError, match="at least one anchor"):
        BlockLayout.single(torch.zeros(0, dtype=torch.int64), 3)
