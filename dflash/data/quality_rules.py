"""What each rule of the quality gate means and where to look when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dflash.data.quality_report import Finding, Unit

MAX_EXAMPLES: Final = 10
MAX_EXAMPLE_CHARS: Final = 200
MIN_ROWS_BEHIND_SHARE: Final = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """Words of one rule; its limits are in `GateThresholds`, its arithmetic in `quality_checks`."""

    title: str
    unit: Unit
    meaning: str
    look_at: str


RULES: Final[dict[str, Rule]] = {
    "min_rows": Rule(
        "Rows in the batch",
        "rows",
        "The batch has fewer rows than a batch must have.",
        "The source's prefix, and the reject reasons below: were the records read at all?",
    ),
    "single_loss_count": Rule(
        "Rows with one and the same number of loss tokens",
        "share",
        "Unrelated answers don't have equally many tokens. A frequent value that output_tokens doesn't confirm is "
        "the size of a template's scaffold: the answer itself was lost (an empty Qwen answer renders as exactly 6).",
        "Inspect an example: which text is coloured? Compare the raw record's keys: is the trace in a field that "
        "isn't read, is content null?",
    ),
    "tiny_mask": Rule(
        "Tiny masks that output_tokens doesn't confirm",
        "share",
        "Almost nothing of these samples is trained on.",
        "Inspect an example. Empty content, a trace in an unknown field, or a prompt that nearly fills max_seq_len.",
    ),
    "median_ratio": Rule(
        "Median of loss tokens to output_tokens",
        "ratio",
        "The mask should cover exactly what the target sampled, which is what the server counted: a ratio of 1.",
        "Below 1: text is lost (trace, tool calls) or the tokenizer differs from the server's. Above 1: prompt or "
        "scaffold tokens are in the mask. Check the tokenizer's name and inspect an example.",
    ),
    "ratio_mismatch": Rule(
        "Rows whose mask disagrees with output_tokens",
        "share",
        "These rows' loss tokens are more than the tolerance away from what the server counted.",
        "Inspect an example and compare with the record's output_tokens; is one source or finish_reason affected?",
    ),
    "length_cut": Rule(
        "Rows that the server cut",
        "share",
        "finish_reason is length: the drafter would rarely see how answers end.",
        "The max_tokens of the generation run.",
    ),
    "window_cut": Rule(
        "Rows cut at max_seq_len",
        "share",
        "These rows lost their end because they are longer than the training window.",
        "The option max_seq_len, and whether one source has very long prompts.",
    ),
    "thinking_only": Rule(
        "Rows with a trace and no answer",
        "share",
        "The server says that these completions are whole, but they hold no answer (cut ones are counted as cut).",
        "The reasoning parser of the server: did it put the answer into reasoning_content?",
    ),
    "empty": Rule(
        "Empty responses",
        "share",
        "Records with nothing to train on: rejected as empty, or rows with fewer than 2 loss tokens.",
        "The raw records: content null, a field that isn't read, a server that returned nothing.",
    ),
    "undecodable": Rule(
        "Rows whose loss tokens don't decode to valid text",
        "share",
        "The response holds broken UTF-8: wrong ids, another tokenizer, or corrupted input.",
        "The tokenizer's name, and the raw record's encoding.",
    ),
    "duplicate_ids": Rule(
        "Rows whose id repeats another's",
        "share",
        "An id must be unique in its dataset; a repeated one usually means a file was given twice.",
        "The input files of the examples: the same file under two keys, or ids that restart in every file?",
    ),
    "duplicate_content": Rule(
        "Rows whose tokens repeat another's",
        "share",
        "The same prompt and response more than once weighs more in training.",
        "The input files of the examples: a retried request written twice, or a greedy server asked the same twice?",
    ),
    "damaged_files": Rule(
        "Input files that are damaged",
        "files",
        "Each is cut, corrupt or too large once decompressed, and was read only up to there. All records behind that "
        "are lost, however many; they appear in no other number, because a damaged file counts as one reject.",
        "The reject report's rows with truncated_file, corrupt_stream or file_too_large: it names the files. Upload "
        "them again (was an upload stopped, or is the file still being written?). To go without the lost records, "
        "set gate.max_damaged_files to the number of damaged files.",
    ),
    "rejected": Rule(
        "Records rejected, all reasons together",
        "share",
        "So many records could not be used.",
        "The reject report: it has file, line, byte offset and message of each.",
    ),
    "rejected_reason": Rule(
        "Records rejected as {reason}",
        "share",
        "So many records could not be used for this one reason.",
        "The reject report's rows with this reason: it has file, line, byte offset and message of each.",
    ),
    "source_mix": Rule(
        "Shift of the source mix",
        "distance",
        "Total variation distance from the current version (0 same, 1 nothing in common), less what a batch of this "
        "size differs by chance.",
        "The tables of sources: is one missing, or is this batch meant to be another kind of data?",
    ),
    "script_mix": Rule(
        "Shift of the language (script) mix",
        "distance",
        "Total variation distance from the current version (0 same, 1 nothing in common), less what a batch of this "
        "size differs by chance.",
        "The tables of scripts: wrong prompts, or text in a broken encoding?",
    ),
}


def share_finding(
    rule: str, count: int, total: int, limit: float, examples: Sequence[str], min_count: int = MIN_ROWS_BEHIND_SHARE
) -> Finding:
    """Judge `count` of `total`: it fails above `limit`, unless fewer than `min_count` are behind it (1 for limit 0)."""
    value = rounded(count / total) if total else None
    behind = 1 if limit == 0 else min_count
    passed = total == 0 or count / total <= limit or count < behind
    return make_finding(rule, value, count, passed=passed, allowed=(None, limit), examples=examples)


def make_finding(
    rule: str,
    value: float | None,
    count: int,
    *,
    passed: bool,
    allowed: tuple[float | None, float | None],
    examples: Sequence[str] = (),
) -> Finding:
    """Put a measured value, the lowest and highest allowed one, and the rule's words together."""
    words = RULES[rule]
    at_least, at_most = allowed
    return Finding(
        rule=rule,
        title=words.title,
        unit=words.unit,
        value=value,
        at_least=at_least,
        at_most=at_most,
        count=count,
        passed=passed,
        meaning=words.meaning,
        look_at=words.look_at,
        examples=tuple(name[:MAX_EXAMPLE_CHARS] for name in examples[:MAX_EXAMPLES]),
    )


def rounded(value: float | np.floating) -> float:
    """Six decimals: the report stays short, and the same on every machine."""
    return round(float(value), 6)
