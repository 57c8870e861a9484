"""A target that decodes one sequence with a cache, and takes tokens back.

Attention caches forget tokens by cropping. The state of a linear-attention layer has taken rejected tokens in for
good, and a sliding window has dropped what it needs: there the cache is put back to how it was before the pass, and
the kept tokens run again. Putting back costs no copy of keys and values, because a pass appends to them by making new
tensors; only recurrent states are written in place and copied beforehand.

Legend: X tokens of a pass, F feature values of a token, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash.errors import ModelError
from dflash.model.features import Target


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass gave.

    Attributes:
        logits_XV: fp32, of the last `num_logits` tokens.
        features_XF: of all its tokens.
    """

    logits_XV: Tensor
    features_XF: Tensor


class TargetSession:
    """One sequence in a target's cache. Not for use by several threads at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.model.config)
        parameters = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._before: list[dict[str, Any]] = []
        self._last_ids: Tensor | None = None
        self.num_passes = 0

    def __len__(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length(self._attention_layer()))

    @property
    def is_croppable(self) -> bool:
        """Whether all layers keep all keys and values, so that tokens can be cut off."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def forward(self, ids_X: Tensor, num_logits: int, *, may_take_back: bool = False) -> Pass:
        """Process tokens behind those in the cache.

        Args:
            ids_X: int64 on the target's device.
            num_logits: logits of how many of the last tokens.
            may_take_back: remember the cache, so that `keep` can follow.
        """
        self._last_ids = ids_X
        self._before = self._remember() if may_take_back and not self.is_croppable else []
        self.num_passes += 1
        with torch.inference_mode(), self._target.capture() as captured:
            output = self._target.model(
                input_ids=ids_X[None], use_cache=True, logits_to_keep=num_logits, **{self._cache_name: self._cache}
            )
            features_XF = captured.features()[0]
        if len(features_XF) != len(ids_X):
            raise ModelError(f"The target gave features of {len(features_XF)} tokens for {len(ids_X)} ids.")
        # Copies leave inference mode, so that callers may do with them what they like.
        return Pass(output.logits[0].float().clone(), features_XF.clone())

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the last pass, which must have been told so."""
        assert self._last_ids is not None
        num_rejected = len(self._last_ids) - num_tokens
        if not num_rejected:
            return
        if self.is_croppable:
            self._cache.crop(-num_rejected)
            return
        for layer, before in zip(self._cache.layers, self._before, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(before)
        self.forward(self._last_ids[:num_tokens], 1)

    def _attention_layer(self) -> int:
        return next((index for index, layer in enumerate(self._cache.layers) if isinstance(layer, DynamicLayer)), 0)

    def _remember(self) -> list[dict[str, Any]]:
        """Copy each layer's attributes: recurrent states by value, the rest by reference."""
        return [
            {name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
            for layer in self._cache.layers
        ]


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in states.items()}
