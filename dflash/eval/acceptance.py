"""How well a drafter drafts: tau, acceptance by position, speed, losslessness.

tau is the mean over verify rounds of (accepted drafts + 1): the tokens that one pass of the target commits. Rounds of
all prompts weigh the same; the first token, which the prompt's own pass gives, belongs to no round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dflash.data.batches import BatchOrder, ShardSource
from dflash.errors import UsageError
from dflash.eval.speculate import Decoded, DecodeOptions, Speculator, decode_plain

TAU = "mean over verify rounds of (accepted drafts + 1)"
OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to evaluate on.

    Attributes:
        id: of the completion it comes from.
        source: group of its report.
        ids: its tokens, up to where the target begins to write.
    """

    id: str
    source: str
    ids: tuple[int, ...]


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


@dataclass(slots=True)
class _Group:
    num_slots: int
    decoded: list[Decoded] = field(default_factory=list)
    plain: list[Decoded] = field(default_factory=list)

    def report(self) -> GroupReport:
        accepted = np.array([number for one in self.decoded for number in one.accepted], dtype=np.int64)
        rounds = max(len(accepted), 1)
        draft_s, verify_s = (sum(getattr(one, name) for one in self.decoded) for name in ("draft_s", "verify_s"))
        spent = max(draft_s + verify_s, 1e-9)
        pairs = list(zip(self.decoded, self.plain, strict=True)) if self.plain else None
        return GroupReport(
            num_prompts=len(self.decoded),
            num_rounds=len(accepted),
            num_tokens=sum(len(one.ids) for one in self.decoded),
            tau=float(accepted.sum() / rounds + 1) if len(accepted) else 1.0,
            acceptance=[float((accepted >= slot).sum() / rounds) for slot in range(1, self.num_slots + 1)],
            tokens_per_s=_later_tokens(self.decoded) / spent,
            plain_tokens_per_s=_later_tokens(self.plain) / max(sum(one.decode_s for one in self.plain), 1e-9)
            if self.plain
            else None,
            draft_share=draft_s / spent,
            verify_share=verify_s / spent,
            num_identical=None if pairs is None else sum(one.ids == plain.ids for one, plain in pairs),
        )


def evaluate(
    speculator: Speculator,
    prompts: Sequence[Prompt],
    options: DecodeOptions,
    *,
    compare: bool = True,
    on_prompt: Callable[[Prompt, Decoded], None] | None = None,
) -> AcceptanceReport:
    """Decode all prompts and count.

    Args:
        speculator: target and drafter.
        prompts: held out of training (see `refuse_training_prompts`).
        options: limits and sampling.
        compare: also decode with the target alone: for the speed-up and, when greedy, for losslessness.
        on_prompt: gets each result.

    Raises:
        UsageError: there are no prompts.
    """
    if not prompts:
        raise UsageError("There are no prompts to evaluate on, so there is no tau. Give held-out prompts.")
    num_slots = speculator.drafter.config.num_draft_tokens
    groups = {name: _Group(num_slots) for name in (OVERALL, *sorted({prompt.source for prompt in prompts}))}
    divergences: list[Divergence] = []
    for prompt in prompts:
        decoded = speculator.decode(prompt.ids, options)
        plain = decode_plain(speculator.target, prompt.ids, options) if compare else None
        for name in (OVERALL, prompt.source):
            groups[name].decoded.append(decoded)
            if plain is not None:
                groups[name].plain.append(plain)
        if plain is not None and options.sampling.is_greedy:
            divergences += _divergence(prompt, decoded, plain)
        if on_prompt is not None:
            on_prompt(prompt, decoded)
    reports = {name: group.report() for name, group in groups.items()}
    if not options.sampling.is_greedy:
        # Two sampled sequences differ by chance, so equality says nothing.
        for report in reports.values():
            report.num_identical = None
    return AcceptanceReport(TAU, reports, divergences, options.max_new_tokens, options.sampling.temperature)


def refuse_training_prompts(prompts: Iterable[Prompt], source: ShardSource) -> None:
    """Check that no prompt was trained on, neither its id nor its tokens.

    Args:
        prompts: held-out prompts.
        source: the training rows; all of them are read.

    Raises:
        UsageError: some were.
    """
    wanted = list(prompts)
    ids = {prompt.id for prompt in wanted}
    digests = {_digest(np.array(prompt.ids, dtype=np.int32)): prompt.id for prompt in wanted}
    found: set[str] = set()
    for pack in BatchOrder(seed=0, pack_tokens=1 << 30, num_epochs=1).packs(source):
        for row in pack.rows:
            start = int(row.loss_mask.argmax()) if row.loss_mask.any() else len(row.loss_mask)
            found |= {row.sample_id} & ids
            found |= {digests[key] for key in (_digest(row.input_ids[:start]),) if key in digests}
    if found:
        raise UsageError(
            f"{len(found)} of {len(wanted)} evaluation prompts are in the training data (for example "
            f"{sorted(found)[:5]}), so their tau says nothing. Take them out of one of the two."
        )


def _digest(ids: np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return hashlib.sha256(ids.tobytes()).digest()


def _later_tokens(decoded: list[Decoded]) -> int:
    """Count tokens that the prompts' own passes didn't give."""
    return sum(len(one.ids) - 1 for one in decoded)


def _divergence(prompt: Prompt, decoded: Decoded, plain: Decoded) -> list[Divergence]:
    if decoded.ids == plain.ids:
        return []
    pairs = zip(decoded.ids, plain.ids, strict=False)
    shorter = min(len(decoded.ids), len(plain.ids))
    index = next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
    at = [ids[index] if index < len(ids) else None for ids in (plain.ids, decoded.ids)]
    gap = plain.gaps[min(index, len(plain.gaps) - 1)]
    return [Divergence(prompt.id, index, at[0], at[1], gap)]
