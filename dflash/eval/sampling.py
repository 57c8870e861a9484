"""Choosing tokens, and the test that keeps speculative sampling lossless.

A draft d, drawn from the drafter's distribution q, is accepted with probability min(1, p(d) / q(d)) under the target's
distribution p; otherwise the token is drawn from max(p - q, 0), rescaled. What comes out is distributed as p alone. At
temperature 0 both are one-hot, and this is 'accept while the draft is the target's likeliest id'.

Legend: L drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.errors import UsageError

_COLDEST = 1e-6  # below it quotients leave fp32; the likeliest id is as good as certain there


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: smallest set of likeliest ids with this probability; 1 keeps all.
        seed: of the generator.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that make no distribution."""
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                f"Expected temperature >= 0 and 0 < top_p <= 1, found {self.temperature} and {self.top_p}."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0

    def probabilities(self, logits_LV: Tensor) -> Tensor:
        """Return the distribution that tokens are drawn from, fp32 [L, V]."""
        p_LV = torch.softmax(logits_LV.float() / max(self.temperature, _COLDEST), dim=-1)
        if self.top_p < 1:
            sorted_LV, order_LV = p_LV.sort(dim=-1, descending=True)
            outside_LV = sorted_LV.cumsum(dim=-1) - sorted_LV >= self.top_p
            outside_LV[..., 0] = False  # a top_p that fp32 takes for 0 leaves the likeliest id
            p_LV = p_LV.masked_fill(outside_LV.scatter(-1, order_LV, outside_LV), 0.0)
        return p_LV / p_LV.sum(dim=-1, keepdim=True)


class Chooser:
    """Draws tokens of one sequence."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def next_token(self, logits_V: Tensor) -> int:
        """Choose one token of the target."""
        if self.sampling.is_greedy:
            return int(logits_V.argmax())
        return self._draw(self.sampling.probabilities(logits_V[None])[0])

    def drafts(self, logits_LV: Tensor) -> tuple[list[int], Tensor | None]:
        """Choose L drafts; with sampling also return their distributions [L, V]."""
        if self.sampling.is_greedy:
            return logits_LV.argmax(dim=-1).tolist(), None
        q_LV = self.sampling.probabilities(logits_LV)
        return [self._draw(q_V) for q_V in q_LV], q_LV

    def verify(self, drafts: list[int], q_LV: Tensor | None, target_logits_XV: Tensor) -> tuple[int, int]:
        """Accept a prefix of the drafts.

        Args:
            drafts: L ids.
            q_LV: their distributions, None when greedy.
            target_logits_XV: L+1 rows; row i is the target's choice for draft i, the last one for what comes behind
                them.

        Returns:
            How many drafts are accepted, and the target's token behind them.
        """
        if q_LV is None:
            wanted = target_logits_XV.argmax(dim=-1).tolist()
            accepted = next((place for place, draft in enumerate(drafts) if draft != wanted[place]), len(drafts))
            return accepted, wanted[accepted]
        p_XV = self.sampling.probabilities(target_logits_XV)
        for place, draft in enumerate(drafts):
            p, q = float(p_XV[place, draft]), float(q_LV[place, draft])
            if float(torch.rand((), generator=self._generator)) * q >= p:
                rest_V = (p_XV[place] - q_LV[place]).clamp(min=0)
                # Nothing is left only where p and q are equal up to rounding; then p itself is right.
                total = rest_V.sum()
                return place, self._draw(rest_V / total if total > 0 else p_XV[place])
        return len(drafts), self._draw(p_XV[-1])

    def _draw(self, p_V: Tensor) -> int:
        return int(torch.multinomial(p_V.cpu(), 1, generator=self._generator))
