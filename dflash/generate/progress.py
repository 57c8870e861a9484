"""What a generation has done so far, for the shell, the artifact and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GenerateProgress:
    """A moment of a run.

    Attributes:
        step: what is being done.
        num_done: records of this batch, those of earlier runs included.
        num_new: records that this run made.
        num_failed: prompts that this run gave up.
        num_prompts: prompts in all.
        in_flight: requests that wait for an answer.
        limit: requests that may wait now.
        num_tokens: tokens that this run sampled.
        tokens_per_s: over the last half minute.
        records_per_s: likewise.
        seconds: since the start.
        kinds: failed tries by kind.
    """

    step: str = "reading prompts"
    num_done: int = 0
    num_new: int = 0
    num_failed: int = 0
    num_prompts: int = 0
    in_flight: int = 0
    limit: int = 0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    records_per_s: float = 0.0
    seconds: float = 0.0
    kinds: Mapping[str, int] = field(default_factory=Counter)

    @property
    def percent(self) -> float:
        """Share of the prompts that are done or given up, in percent."""
        return min(100.0, 100.0 * (self.num_done + self.num_failed) / self.num_prompts) if self.num_prompts else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the last half minute; None before the first record."""
        left = self.num_prompts - self.num_done - self.num_failed
        return left / self.records_per_s if self.records_per_s > 0 else None

    def describe(self) -> str:
        """One line for a person."""
        left = "" if self.seconds_left is None else f", {_duration(self.seconds_left)} left"
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items(), key=lambda it: -it[1])[:4])
        return (
            f"{self.step}: {self.num_done:,}/{self.num_prompts:,} done, {self.num_failed:,} failed, "
            f"{self.in_flight} of {self.limit} in flight, {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.records_per_s:,.1f} records/s{left}{'; tries failed: ' + kinds if kinds else ''}"
        )


class RateMeter:
    """Rates over a sliding window of about half a minute."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._points: list[tuple[float, int, int]] = []

    def rates(self, now: float, num_records: int, num_tokens: int) -> tuple[float, float]:
        """Note the counts at a time; return records and tokens a second."""
        self._points.append((now, num_records, num_tokens))
        while len(self._points) > 2 and now - self._points[1][0] > self._window_s:
            self._points.pop(0)
        first = self._points[0]
        seconds = now - first[0]
        return ((num_records - first[1]) / seconds, (num_tokens - first[2]) / seconds) if seconds > 0 else (0.0, 0.0)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
