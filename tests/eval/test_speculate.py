from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.errors import UsageError
from dflash.eval.sampling import Chooser, Sampling
from dflash.eval.session import TargetSession
from dflash.eval.speculate import Decoded, DecodeOptions, Speculator, decode_plain
from dflash.model.drafter import DraftCache, Drafter
from dflash.model.features import Target

Targets = Callable[[str], Target]
Build = Callable[..., Drafter]


def prompts(count: int, vocab: int = 96) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(2, vocab) for _ in range(rng.randrange(1, 14))] for _ in range(count)]


class Oracle(Speculator):
    """Drafts the right tokens up to a slot drawn for each round, so that every number is accepted now and then."""

    def decode_knowing(self, prompt: Sequence[int], right: Sequence[int], options: DecodeOptions) -> Decoded:
        self.right, self.start, self.rng = list(right), len(prompt), random.Random(str(prompt))
        return self.decode(prompt, options)

    def _draft_logits(self, anchor: int, position: int, cache: DraftCache) -> Tensor:
        real = super()._draft_logits(anchor, position, cache)
        known = self.right[position - self.start + 1 :][: self.rng.randrange(len(real) + 1)]
        for slot, token in enumerate(known[: len(real)]):
            real[slot, token] = 1e4
        return real


@pytest.mark.parametrize(("model", "count"), [("llama", 15), ("sliding", 15), ("hybrid", 50)])
def test_greedy_ids_are_the_targets_own(targets: Targets, random_drafter: Build, model: str, count: int) -> None:
    target = targets(model)
    options = DecodeOptions(max_new_tokens=8)
    oracle = Oracle(target, random_drafter(target))
    accepted: set[int] = set()
    for number, prompt in enumerate(prompts(count)):
        plain = decode_plain(target, prompt, options)
        assert len(plain.ids) == len(plain.gaps) == 8
        speculative = Speculator(target, oracle.drafter).decode(prompt, options)
        assert speculative.ids == plain.ids, min(plain.gaps)
        if number >= 15:
            continue
        helped = oracle.decode_knowing(prompt, plain.ids, options)
        assert helped.ids == plain.ids, min(plain.gaps)
        accepted |= set(helped.accepted)
    assert accepted >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_the_draft_cache_sees_what_training_sees(targets: Targets, random_drafter: Build, model: str) -> None:
    """After rounds with rejections the drafter's context is that of the whole sequence computed anew."""
    target = targets(model)
    drafter = random_drafter(target)
    prompt = prompts(3)[2]
    seen: list[tuple[list[int], Tensor]] = []

    class Watching(Oracle):
        def _draft_logits(self, anchor: int, position: int, cache: DraftCache) -> Tensor:
            context = torch.cat([part.flatten() for part in cache.context(0, 0, position)])
            seen.append((self.known[:position], context.clone()))
            return super()._draft_logits(anchor, position, cache)

        known: list[int]

    options = DecodeOptions(max_new_tokens=16)
    plain = decode_plain(target, prompt, options)
    watching = Watching(target, drafter)
    watching.known = prompt + plain.ids
    watching.decode_knowing(prompt, plain.ids, options)
    assert len(seen) > 2
    for ids, context in seen:
        fresh = DraftCache(drafter)
        fresh.extend(target.features(torch.tensor(ids)))
        expected = torch.cat([part.flatten() for part in fresh.context(0, 0, len(ids))])
        torch.testing.assert_close(context, expected, rtol=1e-3, atol=1e-4)


def test_ends_behind_an_end_token_inside_a_block(targets: Targets, random_drafter: Build) -> None:
    target = targets("llama")
    oracle = Oracle(target, random_drafter(target))
    for prompt in prompts(6):
        free = decode_plain(target, prompt, DecodeOptions(12)).ids
        for end in set(free):
            options = DecodeOptions(12, eos_ids=(end,))
            plain = decode_plain(target, prompt, options)
            assert plain.ids == free[: free.index(end) + 1]
            done = oracle.decode_knowing(prompt, free, options)
            assert done.ids == plain.ids
            assert sum(done.accepted) <= len(done.ids)


def test_keep_puts_a_hybrid_cache_back(targets: Targets) -> None:
    target = targets("hybrid")
    ids = torch.tensor(prompts(3)[1] + [7, 8, 9, 10])
    session = TargetSession(target)
    session.forward(ids[:4], 1)
    for kept in (0, 1, 3):
        before = len(session)
        session.forward(torch.tensor([20, 21, 22, 23]), 4, may_take_back=True)
        if kept:
            session.keep(kept)
            assert len(session) == before + kept
    assert not session.is_croppable
    straight = TargetSession(target)
    straight.forward(ids[:4], 1)
    straight.forward(torch.tensor([20, 21, 22, 23]), 4)
    for part in ([20], [20, 21, 22]):
        straight.forward(torch.tensor(part), 1)
    probe = torch.tensor([5])
    torch.testing.assert_close(
        session.forward(probe, 1).logits_XV, straight.forward(probe, 1).logits_XV, rtol=1e-4, atol=1e-4
    )


def test_other_layers_than_the_drafters_are_refused(targets: Targets, random_drafter: Build) -> None:
    target = targets("llama")
    with pytest.raises(UsageError, match=r"reads layers \[0, 2\].*captures \[1, 2\]"):
        Speculator(Target(target.model, (1, 2)), random_drafter(target))


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_settings_without_a_distribution_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="temperature"):
        Sampling(**fields)


def test_speculative_sampling_is_distributed_as_the_target() -> None:
    """First two tokens of a verify round against the exact distribution; the drafter's is far from it."""
    g = torch.Generator().manual_seed(0)
    target_logits = torch.randn(3, 5, generator=g) * 1.5
    draft_logits = torch.randn(2, 5, generator=g) * 1.5
    chooser = Chooser(Sampling(temperature=0.8, seed=4))
    rounds = 6000
    first, second = torch.zeros(5), torch.zeros(5)
    for _ in range(rounds):
        drafts, q = chooser.drafts(draft_logits)
        accepted, token = chooser.verify(drafts, q, target_logits)
        out = [*drafts[:accepted], token]
        first[out[0]] += 1
        if len(out) > 1:
            second[out[1]] += 1
    expected = torch.softmax(target_logits / 0.8, dim=-1)
    assert (first / rounds - expected[0]).abs().max() < 0.02
    assert (second / second.sum() - expected[1]).abs().max() < 0.03


def test_top_p_keeps_the_smallest_set_and_sampling_repeats_by_seed(targets: Targets, random_drafter: Build) -> None:
    p = Sampling(temperature=1.0, top_p=0.6).probabilities(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log())
    torch.testing.assert_close(p, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    target = targets("llama")
    speculator = Speculator(target, random_drafter(target))
    runs = [speculator.decode([3, 4], DecodeOptions(8, sampling=Sampling(1.0, 0.9, seed))).ids for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_sampled_answers_are_distributed_as_the_target(targets: Targets, random_drafter: Build) -> None:
    """The second new token over many seeds against its exact distribution; the drafter proposes all but the first."""
    target = targets("llama")
    speculator = Speculator(target, random_drafter(target))
    prompt, count, sampling = [3, 4, 5], 200, Sampling(temperature=2.0, top_p=0.6)

    def exact(ids: list[int]) -> Tensor:
        return sampling.probabilities(TargetSession(target).forward(torch.tensor(ids), 1).logits_XV)[0]

    first_V = exact(prompt)
    expected_V = sum(float(first_V[one]) * exact([*prompt, one]) for one in first_V.nonzero().flatten().tolist())
    assert isinstance(expected_V, Tensor)
    seen_V = torch.zeros_like(expected_V)
    drafted = 0
    for seed in range(count):
        done = speculator.decode(prompt, DecodeOptions(2, sampling=Sampling(2.0, 0.6, seed)))
        seen_V[done.ids[1]] += 1 / count
        drafted += done.accepted[0] > 0
    assert 0 < drafted < count, "both an accepted draft and a replaced one must occur"
    # Four standard deviations of the likeliest id.
    likeliest = float(expected_V.max())
    assert (seen_V - expected_V).abs().max() < 4 * (likeliest * (1 - likeliest) / count) ** 0.5
