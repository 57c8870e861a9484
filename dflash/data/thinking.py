"""In which thinking mode the rows of a dataset were sampled, read from the rows themselves.

A template that reacts to `enable_thinking` ends the prompt of the two modes differently, and the target's first token
comes right behind that. A drafter that was trained in one mode drafts badly in the other, so its checkpoint says it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from dflash.data.chat import THINKING_FLAG
from dflash.data.row_reader import Row, ShardReader
from dflash.data.tokenizer import TargetTokenizer

MAX_ROWS = 2_000
MAX_ROW_TOKENS = 1 << 20


def count_thinking(shard: Path, num_rows: int, tokenizer: TargetTokenizer) -> dict[str, int]:
    """Count the first rows of a shard by mode: `on`, `off`, and `other` where the prompt ends in neither way.

    Args:
        shard: file of the shard.
        num_rows: rows in it.
        tokenizer: the one that made its ids.

    Returns:
        Empty where the template doesn't react to the flag.
    """
    if not tokenizer.template.reacts_to_thinking:
        return {}
    endings = {name: _ending(tokenizer, value) for name, value in (("on", True), ("off", False))}
    reader = ShardReader(shard, 0, num_rows)
    rows = (reader.row(row, MAX_ROW_TOKENS) for row in range(min(num_rows, MAX_ROWS)))
    return dict(sorted(Counter(_mode(row, endings) for row in rows).items()))


def _ending(tokenizer: TargetTokenizer, thinking: bool) -> list[int]:
    """Ids that a generation prompt adds to a conversation."""
    question = [{"role": "user", "content": "a"}]
    kwargs = {THINKING_FLAG: thinking}
    without, prompt = (
        tokenizer.template.render(question, None, kwargs, add_generation_prompt=add) for add in (False, True)
    )
    return list(tokenizer.backend.encode(prompt.removeprefix(without), add_special_tokens=False).ids)


def _mode(row: Row, endings: dict[str, list[int]]) -> str:
    """The mode whose ending, the longest one, stands before the last response."""
    starts = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1)
    before = row.input_ids[: starts[-1]].tolist() if len(starts) else []
    fitting = [name for name, ids in endings.items() if ids and before[-len(ids) :] == ids]
    return max(fitting, key=lambda name: len(endings[name]), default="other")
