"""What a person sees of a run: done, failed, in flight, rates, the estimated end, kinds of failures."""

from __future__ import annotations

from collections import Counter

import pytest

from dflash.generate.progress import GenerateProgress, RateMeter


def test_the_line_says_it_all() -> None:
    progress = GenerateProgress(
        step="generating",
        num_done=1200,
        num_new=200,
        num_failed=3,
        num_prompts=10_003,
        in_flight=250,
        limit=256,
        tokens_per_s=12_345.6,
        records_per_s=2.0,
        kinds=Counter(timeout=2, empty=7),
    )
    assert progress.describe() == (
        "generating: 1,200/10,003 done, 3 failed, 250 of 256 in flight, 12,346 tokens/s, 2.0 records/s, "
        "1 h 13 min left; tries failed: empty 7, timeout 2"
    )
    assert progress.percent == pytest.approx(100 * 1203 / 10_003)


def test_nothing_is_estimated_from_nothing() -> None:
    progress = GenerateProgress(step="generating", num_prompts=5)
    assert (progress.seconds_left, progress.percent) == (None, 0)
    assert progress.describe() == "generating: 0/5 done, 0 failed, 0 of 0 in flight, 0 tokens/s, 0.0 records/s"
    assert GenerateProgress().percent == 0


@pytest.mark.parametrize(("records_per_s", "left"), [(1.0, "59 s"), (0.5, "1 min 58 s"), (0.005, "3 h 16 min")])
def test_the_estimated_end(records_per_s: float, left: str) -> None:
    progress = GenerateProgress(num_done=40, num_failed=1, num_prompts=100, records_per_s=records_per_s)
    assert f", {left} left" in progress.describe()


def test_rates_are_those_of_the_last_half_minute() -> None:
    meter = RateMeter(window_s=30)
    assert meter.rates(0, 0, 0) == (0, 0)
    for second in range(1, 101):  # 10 records a second, 1 after the fiftieth
        rates = meter.rates(second, 10 * min(second, 50) + max(0, second - 50), 100 * second)
        if second == 50:
            assert rates == (10, 100)
    assert rates == (1, 100)
