"""Initial weights that spare a short run its first thousand steps.

Two things are learnt slowly from random weights, and both can be written down instead:

- What is common. The frozen head expects states that know the answer, so random states put logits far apart and the
  first losses are above 13. Until the drafter has found the direction that says "the usual tokens", all of its updates
  go there, and since the final norm hides their size, they grow until what depends on the context no longer shows.
  Here the last MLP begins by writing that direction.
- What is near. All predicted slots hold the same token, so the first layer's queries are constant and its heads look
  everywhere alike. Here they begin by looking at the nearest tokens, each head a little further back.

Everything else stays random, and everything is trained from there. It is meant for drafters that are trained for
minutes; the figures are in `docs/decisions.md`.

Legend: S tokens, F feature values, N blocks, B slots, L = B-1 predicted slots, H hidden size, V vocabulary, Q query
heads, G key/value heads, D head size, P = D/2 rotary pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dflash.data.batches import Pack
from dflash.errors import TrainingError
from dflash.model.attention import BlockLayout
from dflash.model.drafter import Drafter, block_embeddings
from dflash.model.layout import DrafterConfig
from dflash.train.anchors import sample_anchors
from dflash.train.feature_source import FeatureModel
from dflash.train.packed import PackedRow
from dflash.train.seeds import named_generator

# How far the constant outweighs the random rest of a state: enough to begin at the frequencies of the tokens.
_PRIOR_SCALE = 6.0

# Tokens that each head looks back from its slot, in turn; None looks at all near ones.
_OFFSETS = (None, 0, 1, 2, 3, 4, 5, 6, 8)

# Rotation per token, in radians, of the rotary pairs that tell near positions apart, and of those for a wide look.
_NARROW, _WIDE = (0.009, 2.0), (0.004, 0.12)

# Size of the query's positional part against its random one.
_QUERY_SCALE = 1.5


def warm_start(drafter: Drafter, target: FeatureModel, packs: Sequence[Pack], counts_V: Tensor) -> None:
    """Change the weights of a freshly drawn drafter.

    Args:
        drafter: whole, not sharded; on the target's device.
        target: gives features, embedding and head.
        packs: some rows to measure averages on; a thousand tokens are enough.
        counts_V: how often the target wrote each id of the vocabulary.

    Raises:
        TrainingError: no row of `packs` has a token to begin a block at.
    """
    probe = _Probe(drafter, target, packs)
    with torch.no_grad():
        _look_near(drafter, target.embedding_VH, probe)
    wanted_H = prior_state(target.head_VH.float(), counts_V, drafter.norm.weight.detach(), drafter.config.rms_norm_eps)
    with torch.no_grad():
        _begin_at(drafter, wanted_H, probe)


def prior_state(head_VH: Tensor, counts_V: Tensor, norm_weight_H: Tensor, eps: float) -> Tensor:
    """Find the state before the final norm, of length 1, whose logits come nearest to the tokens' frequencies.

    Args:
        head_VH: the head, fp32.
        counts_V: occurrences; a tenth is added to each, so that an id that never occurs isn't ruled out.
        norm_weight_H: of the final norm.
        eps: of the final norm.
    """
    p_V = counts_V.to(head_VH.device, torch.float32) + 0.1
    p_V = p_V / p_V.sum()
    state_H = (head_VH.T @ p_V - head_VH.mean(dim=0)).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([state_H], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        normed_H = functional.rms_norm(state_H, (len(state_H),), eps=eps) * norm_weight_H
        value = -(p_V * torch.log_softmax(head_VH @ normed_H, dim=0)).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return functional.normalize(state_H.detach(), dim=0)


class _Probe:
    """Blocks on real rows, to see what the random weights make of them."""

    def __init__(self, drafter: Drafter, target: FeatureModel, packs: Sequence[Pack]) -> None:
        packed = PackedRow.of(tuple(row for pack in packs for row in pack.rows))
        device = target.head_VH.device
        anchor_N = sample_anchors(packed.loss_mask_S, packed.document_S, 256, named_generator("warm start"))
        if not len(anchor_N):
            raise TrainingError(
                "warm_start found no token to begin a block at in the first packs: their rows have no two neighbouring "
                "tokens that the target wrote. Turn warm_start off, or look at the data with `dflash inspect`."
            )
        ids_S, position_S, document_S, anchor_N = (
            tensor.to(device) for tensor in (packed.ids_S, packed.position_S, packed.document_S, anchor_N)
        )
        self.ids_S = ids_S
        self.features_SF = target.features(ids_S, position_S, document_S).float()
        self.layout = BlockLayout(anchor_N, position_S, document_S)
        self.embeddings_NBH = block_embeddings(target.embedding_VH, ids_S, anchor_N, drafter.config).float()

    def last_mlp(self, drafter: Drafter) -> tuple[Tensor, Tensor]:
        """Run the blocks; return what enters the last MLP's residual sum and its down projection [N * L, ...] each."""
        layer = drafter.layer(drafter.config.num_hidden_layers - 1)
        seen: dict[str, Tensor] = {}
        hooks = [
            layer.post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0])),
            layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.update(z=inputs[0])),
        ]
        try:
            drafter(self.features_SF, self.embeddings_NBH, self.layout)
        finally:
            for hook in hooks:
                hook.remove()
        size = drafter.config.block_size
        x, z = (seen[name].view(-1, size, seen[name].shape[-1])[:, 1:].flatten(0, 1) for name in ("x", "z"))
        return x, z


def _begin_at(drafter: Drafter, wanted_H: Tensor, probe: _Probe) -> None:
    """Add one direction to the last down projection, so that the average state becomes `wanted_H`, scaled up."""
    x_MH, z_MI = probe.last_mlp(drafter)
    down = drafter.layer(drafter.config.num_hidden_layers - 1).mlp.down_proj
    state_MH = x_MH + down(z_MI)
    length = _PRIOR_SCALE * state_MH.norm(dim=1).mean()
    x_H, z_I = x_MH.mean(dim=0), z_MI.mean(dim=0)
    missing_H = length * wanted_H - x_H - down(z_I)
    down.weight += torch.outer(missing_H, z_I) / (z_I @ z_I)


def _look_near(drafter: Drafter, embedding_VH: Tensor, probe: _Probe) -> None:
    """Give keys a part that only tells their position, and each head's query one that asks for a near position.

    A rotary pair contributes the cosine of (its rotation per token times the distance, less a phase): with the phase of
    a distance all pairs agree there. Keys of context and of the anchor get the part through their averages, the mask
    token's key the opposite one, so that blocks don't look at their own empty slots.
    """
    config, layer = drafter.config, drafter.layer(0)
    attention = layer.self_attn
    context_SH = drafter.context(probe.features_SF)
    mask_H = layer.input_layernorm(embedding_VH[config.mask_token_id].float())
    token_H = layer.input_layernorm(embedding_VH[probe.ids_S].float()).mean(dim=0)
    averages_H3 = torch.stack([context_SH.mean(dim=0), token_H, mask_H], dim=1)
    inverse_3H = torch.linalg.pinv(averages_H3)

    keys_GDH = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    size = (keys_GDH @ context_SH.T).norm(dim=1).mean()
    here_D = _ask(config, 0).to(keys_GDH)
    parts_D3 = size * torch.stack([here_D, here_D, -here_D], dim=1)
    keys_GDH += (parts_D3 - keys_GDH @ averages_H3) @ inverse_3H

    queries_QDH = attention.q_proj.weight.view(config.num_attention_heads, config.head_dim, -1)
    random_QD = queries_QDH @ mask_H
    asks_QD = torch.stack([_ask(config, _OFFSETS[head % len(_OFFSETS)]) for head in range(len(queries_QDH))])
    wanted_QD = _QUERY_SCALE * random_QD.norm(dim=1).mean() * asks_QD.to(random_QD) - random_QD / 2
    queries_QDH += wanted_QD[:, :, None] * mask_H / (mask_H @ mask_H)


def _ask(config: DrafterConfig, offset: int | None) -> Tensor:
    """Return the query [D], of length 1, that looks `offset` tokens back, or at all near tokens."""
    rotation_P = _rotations(config)
    if offset is None:
        return torch.cat([_pairs(config, _WIDE), torch.zeros_like(rotation_P)])
    weight_P = _pairs(config, _NARROW)
    return torch.cat([weight_P * torch.cos(rotation_P * offset), -weight_P * torch.sin(rotation_P * offset)])


def _pairs(config: DrafterConfig, between: tuple[float, float]) -> Tensor:
    """Return equal weights [P] for the pairs whose rotation lies between two values, of length 1 together."""
    rotation_P = _rotations(config)
    chosen_P = ((rotation_P >= between[0]) & (rotation_P <= between[1])).float()
    if not chosen_P.any():
        chosen_P[0] = 1.0
    return functional.normalize(chosen_P, dim=0)


def _rotations(config: DrafterConfig) -> Tensor:
    """Return the rotation per token of each rotary pair [P], as `Rotary` has it."""
    exponent_P = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-exponent_P
