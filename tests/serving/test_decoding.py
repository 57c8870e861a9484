from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.errors import ServiceError
from dflash.eval.sampling import Sampling
from dflash.eval.speculate import DecodeOptions, Speculator
from dflash.model.drafter import Drafter
from dflash.model.features import Target
from dflash.model.layout import DrafterConfig
from dflash.model.target_loading import load_model
from dflash.serving.decoding import Decoding, decode_batch
from dflash.serving.engine import Engine

END = frozenset({2})


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load_model(str(tiny_target), torch.float32, trust_remote_code=False).eval()


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by whole passes without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in END:
            break
    return ids[len(prompt) :]


def test_greedy_rows_of_a_batch_are_those_of_each_prompt_alone(model: Any) -> None:
    prompts = [[5], [7, 8, 9, 10, 11], [100, 2000, 3]]
    limits = [4, 9, 1]
    rows = [Decoding(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    with torch.inference_mode():
        expected = [reference(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    assert decode_batch(model, rows, END) == expected


def test_an_end_id_ends_a_row_and_is_part_of_it(model: Any) -> None:
    first = decode_batch(model, [Decoding([5, 6], 1)], END)[0][0]
    got = decode_batch(model, [Decoding([5, 6], 10), Decoding([9, 9, 9], 3)], frozenset({first}))
    assert got[0] == [first]
    assert 1 <= len(got[1]) <= 3


def test_a_seed_decides_whatever_the_neighbours(model: Any) -> None:
    def sampled(seed: int) -> Decoding:
        return Decoding([5, 6, 7], 8, Sampling(1.5, 0.9, seed))

    alone = decode_batch(model, [sampled(3)], END)[0]
    beside = decode_batch(model, [Decoding([1, 2, 3, 4], 5, Sampling(1.0, 1.0, 9)), sampled(3)], END)[1]
    assert alone == beside
    assert decode_batch(model, [sampled(4)], END)[0] != alone


def test_top_k_of_one_is_greedy(model: Any) -> None:
    greedy = decode_batch(model, [Decoding([5, 6, 7], 6)], END)
    assert decode_batch(model, [Decoding([5, 6, 7], 6, Sampling(2.0, 1.0, 1), top_k=1)], END) == greedy


def test_the_engine_decodes_what_waits_together_and_refuses_when_it_stops(model: Any) -> None:
    with Engine(model, END, max_batch=8, max_waiting=8) as engine:
        futures = [engine.submit(Decoding([5, number], 3)) for number in range(6)]
        answers = [future.result(60) for future in futures if future is not None]
    assert [len(answer.ids) for answer in answers] == [3] * 6
    assert len({answer.seconds for answer in answers}) < 6, "at least two were in one batch"
    assert engine.submit(Decoding([5], 1)) is None


def test_what_is_in_work_is_refused_when_the_engine_stops(model: Any) -> None:
    with Engine(model, END) as engine:
        working, waiting = engine.submit(Decoding([5], 10**6)), None
        while waiting is None or not working.running():  # type: ignore[union-attr]
            waiting = engine.submit(Decoding([6], 1))
    for future in (working, waiting):
        assert future is not None
        assert isinstance(future.exception(60), ServiceError)


def test_a_stopped_decoding_ends_with_what_it_has(model: Any) -> None:
    stops = iter([False, False, True])
    whole = decode_batch(model, [Decoding([5, 6, 7], 9)], END)
    assert decode_batch(model, [Decoding([5, 6, 7], 9)], END, lambda: next(stops)) == [whole[0][:2]]


def test_a_row_that_is_given_up_leaves_its_batch_with_what_it_has(model: Any) -> None:
    left = Decoding([5, 6, 7], 9)
    stops = iter([lambda: False, lambda: False, left.given_up.set, *[lambda: False] * 9])
    whole = decode_batch(model, [Decoding([5, 6, 7], 9)], END)[0]
    rows = [left, Decoding([5, 6, 7], 9)]
    assert decode_batch(model, rows, END, lambda: bool(next(stops)())) == [whole[:2], whole]


def test_a_failing_batch_fails_alone(model: Any) -> None:
    with Engine(model, END) as engine:
        bad = engine.submit(Decoding([10**9], 3))
        assert bad is not None
        assert isinstance(bad.exception(60), IndexError)
        good = engine.submit(Decoding([5], 2))
        assert good is not None
        assert len(good.result(60).ids) == 2


def test_one_request_alone_is_decoded_with_the_drafter(tiny_target: Path) -> None:
    target = Target.load(str(tiny_target), (0,))
    config = DrafterConfig.for_target(
        target.text_config, mask_token_id=16, num_hidden_layers=1, block_size=4, target_layer_ids=(0,)
    )
    drafter = Drafter(config)
    drafter.initialize(torch.Generator().manual_seed(2), std=0.2)
    plain = decode_batch(target.model, [Decoding([5, 6, 7], 12)], END)[0]
    with Engine(target.model, END, Speculator(target, drafter)) as engine:
        future = engine.submit(Decoding([5, 6, 7], 12))
        assert future is not None
        answer = future.result(60)
    assert answer.ids == plain
    assert answer.accepted is not None
    assert sum(answer.accepted) + len(answer.accepted) >= len(plain) - 1
    stopped = Speculator(target, drafter).decode([5, 6, 7], DecodeOptions(12, END, is_stopped=lambda: True))
    assert stopped.ids == plain[:1], "the prompt's pass gives one"
