"""Lossless speculative decoding of one sequence (paper, section 4.3).

A round: the drafter fills a block behind the last committed token, the target processes that token and the drafts in
one pass, the longest accepted prefix and one more token of the target are committed. The drafter's cache holds context
only and gets the features of what was accepted; the target's cache takes back what wasn't.

Legend: B slots of a block, L = B-1 drafts, H hidden size, V vocabulary, F feature values of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.errors import UsageError
from dflash.eval.sampling import Chooser, Sampling
from dflash.eval.session import TargetSession
from dflash.model.drafter import DraftCache, Drafter, block_embeddings
from dflash.model.features import Target


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """When and how to decode.

    Attributes:
        max_new_tokens: at most so many.
        eos_ids: any of these ends the sequence and is part of it.
        sampling: how tokens are chosen.
        is_stopped: asked before each round; a decoding that is stopped ends with what it has.
    """

    max_new_tokens: int
    eos_ids: Collection[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    is_stopped: Callable[[], bool] = bool  # `bool()` is False: never


@dataclass(slots=True)
class Decoded:
    """A decoded sequence and what it took.

    Attributes:
        ids: new tokens, an end token included.
        accepted: accepted drafts of each verify round; the limit on tokens doesn't shorten a round, an end token does.
        gaps: of plain decoding only: how far the likeliest id was ahead of the second, in logits, at each new token.
        prefill_s: time of the prompt.
        draft_s: time in the drafter.
        verify_s: time in the target behind the prompt.
        num_passes: target passes, those that restore a state included.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_passes: int = 0

    @property
    def decode_s(self) -> float:
        """Time behind the prompt."""
        return self.draft_s + self.verify_s


class Speculator:
    """Decodes with a target and a drafter.

    Args:
        target: captures the layers that the drafter was trained on.
        drafter: on the same device.

    Raises:
        UsageError: the target captures other layers than the drafter reads.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        if target.layer_ids != drafter.config.target_layer_ids:
            raise UsageError(
                f"The drafter reads layers {list(drafter.config.target_layer_ids)} of its target, but the target "
                f"captures {list(target.layer_ids)}. Load the target with the drafter's target_layer_ids."
            )
        self.target = target
        self.drafter = drafter.eval()
        self._dtype = next(drafter.parameters()).dtype

    def decode(self, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
        """Decode behind a prompt; greedy ids are the target's own greedy ids.

        Args:
            prompt_ids: at least one token.
            options: limits and sampling.
        """
        done, chooser = Decoded(), Chooser(options.sampling)
        session, cache = TargetSession(self.target), DraftCache(self.drafter)
        prompt = self._tensor(prompt_ids)
        started = self._clock()
        first = session.forward(prompt, 1)
        cache.extend(first.features_XF.to(self._dtype))
        done.ids.append(chooser.next_token(first.logits_XV[-1]))
        done.prefill_s = self._clock() - started
        while len(done.ids) < options.max_new_tokens and done.ids[-1] not in options.eos_ids:
            if options.is_stopped():
                break
            self._round(done, len(prompt_ids), session, cache, chooser, options)
        done.ids = done.ids[: options.max_new_tokens]
        done.num_passes = session.num_passes
        return done

    def _round(
        self,
        done: Decoded,
        num_prompt: int,
        session: TargetSession,
        cache: DraftCache,
        chooser: Chooser,
        options: DecodeOptions,
    ) -> None:
        started = self._clock()
        drafts, q_LV = chooser.drafts(self._draft_logits(done.ids[-1], num_prompt + len(done.ids) - 1, cache))
        drafted = self._clock()
        verified = session.forward(self._tensor([done.ids[-1], *drafts]), len(drafts) + 1, may_take_back=True)
        accepted, token = chooser.verify(drafts, q_LV, verified.logits_XV)
        new = [*drafts[:accepted], token]
        end = next((place for place, one in enumerate(new) if one in options.eos_ids), None)
        if end is not None:
            new, accepted = new[: end + 1], min(accepted, end + 1)
        session.keep(accepted + 1)
        kept = self._clock()
        cache.extend(verified.features_XF[: accepted + 1].to(self._dtype))
        done.ids += new
        done.accepted.append(accepted)
        done.verify_s += kept - drafted
        done.draft_s += drafted - started + self._clock() - kept

    def _draft_logits(self, anchor: int, position: int, cache: DraftCache) -> Tensor:
        """Return the drafter's logits of the L slots behind the anchor, over the whole vocabulary."""
        ids = self._tensor([anchor])
        embeddings = block_embeddings(self.target.embedding_VH, ids, torch.zeros_like(ids), self.drafter.config)
        hidden_BH = cache.draft(embeddings.to(self._dtype), position)
        head_VH = self.target.head_VH
        return (hidden_BH[1:].to(head_VH.dtype) @ head_VH.T).float()

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.target.device)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def decode_plain(target: Target, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """Decode with the target alone, one token a pass, by the same code path."""
    done, chooser, session = Decoded(), Chooser(options.sampling), TargetSession(target)
    started = time.perf_counter()
    ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
    while True:
        logits_V = session.forward(ids, 1).logits_XV[-1]
        best = logits_V.topk(2).values.tolist()
        done.gaps.append(best[0] - best[1])
        done.ids.append(chooser.next_token(logits_V))
        if len(done.ids) == 1:
            done.prefill_s = time.perf_counter() - started
        if len(done.ids) >= options.max_new_tokens or done.ids[-1] in options.eos_ids:
            break
        ids = torch.tensor([done.ids[-1]], dtype=torch.int64, device=target.device)
    done.verify_s = time.perf_counter() - started - done.prefill_s
    done.num_passes = session.num_passes
    return done
