"""How well a drafter drafts: tau, acceptance by position, speed, losslessness (defined in `report.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash.data.batches import BatchOrder, ShardSource
from dflash.errors import UsageError
from dflash.eval.prompts import Prompt
from dflash.eval.report import OVERALL, TAU, AcceptanceReport, Divergence, GroupReport
from dflash.eval.speculate import Decoded, DecodeOptions, Speculator, decode_plain


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
        UsageError: there are no prompts, or one has a source named as the group of all.
    """
    _require_prompts(prompts)
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
    """Check that no prompt was trained on, neither its id nor its tokens, before whichever response of a row.

    Args:
        prompts: held-out prompts.
        source: the training rows; all of them are read.

    Raises:
        UsageError: some were.
    """
    wanted = list(prompts)
    ids = {prompt.id for prompt in wanted}
    digests = {_digest(np.array(prompt.ids, dtype=np.int32)): prompt.id for prompt in wanted}
    lengths = {len(prompt.ids) for prompt in wanted}
    found: set[str] = set()
    for pack in BatchOrder(seed=0, pack_tokens=1 << 30, num_epochs=1).packs(source):
        for row in pack.rows:
            starts = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1).tolist()
            before = (_digest(row.input_ids[:start]) for start in starts if start in lengths)
            found |= {row.sample_id} & ids
            found |= {digests[key] for key in before if key in digests}
    if found:
        raise UsageError(
            f"{len(found)} of {len(wanted)} evaluation prompts are in the training data (for example "
            f"{sorted(found)[:5]}), so their tau says nothing. Take them out of one of the two."
        )


def _require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise UsageError("There are no prompts to evaluate on, so there is no tau. Give held-out prompts.")
    if named := [prompt.id for prompt in prompts if prompt.source == OVERALL]:
        raise UsageError(
            f"{len(named)} of {len(prompts)} prompts, such as {named[0]!r}, have the source {OVERALL!r}, which names "
            "the group of all prompts: they would count twice in it. Give their source another name."
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
