"""What an evaluation says, without torch: flows and gates on machines that have none read it.

tau is the mean over verify rounds of (accepted drafts + 1): the tokens that one pass of the target commits. Rounds of
all prompts weigh the same; the first token, which the prompt's own pass gives, belongs to no round.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TAU = "mean over verify rounds of (accepted drafts + 1)"
OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where speculative greedy decoding left plain greedy decoding.

    Attributes:
        prompt_id: of the prompt.
        index: first new token that differs.
        plain: the id that plain decoding chose.
        speculative: the other one; None where the sequence ended before.
        logit_gap: how far the likeliest id was ahead of the second there. A small gap is a near tie, which another
            batch shape may flip by rounding; a large one is a fault.
    """

    prompt_id: str
    index: int
    plain: int | None
    speculative: int | None
    logit_gap: float


@dataclass(slots=True)
class GroupReport:
    """Numbers of one source, or of all.

    Attributes:
        num_prompts: prompts.
        num_rounds: verify rounds.
        num_tokens: new tokens.
        tau: see the module.
        acceptance: for slot k = 1.., the share of rounds that accepted it and all slots before it.
        tokens_per_s: of speculative decoding, prompts' own passes left out.
        plain_tokens_per_s: of plain decoding; None where it wasn't run.
        draft_share: share of the decoding time spent in the drafter.
        verify_share: in the target.
        num_identical: prompts with the same ids as plain decoding; None where it wasn't run.
    """

    num_prompts: int
    num_rounds: int
    num_tokens: int
    tau: float
    acceptance: list[float]
    tokens_per_s: float
    plain_tokens_per_s: float | None
    draft_share: float
    verify_share: float
    num_identical: int | None


@dataclass(slots=True)
class AcceptanceReport:
    """An evaluation.

    Attributes:
        definition: of tau.
        groups: by source, and `overall`.
        divergences: of greedy decoding from the target's own.
        max_new_tokens: limit for each prompt.
        temperature: 0 is greedy.
    """

    definition: str
    groups: dict[str, GroupReport]
    divergences: list[Divergence]
    max_new_tokens: int
    temperature: float

    @property
    def tau(self) -> float:
        """Overall tau."""
        return self.groups[OVERALL].tau

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)
