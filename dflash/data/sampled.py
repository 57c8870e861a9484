"""Checks of the ids that a record carries: of the vocabulary, and of the text that the record shows for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from dflash.data.records import Completion, Reason, bad_field
from dflash.data.rows import RowFlag
from dflash.errors import RecordError

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer

REPLACEMENT = "\ufffd"  # what servers print for bytes that aren't a whole character yet


def check_ids(where: str, ids: Sequence[int], known: Collection[int]) -> None:
    """Refuse ids that aren't integers of the vocabulary.

    Args:
        where: for the message.
        ids: not empty.
        known: the vocabulary's ids, maybe with gaps.

    Raises:
        RecordError: `bad_field`.
    """
    wrong = [item for item in ids if type(item) is not int] or [item for item in set(ids) if item not in known]
    if wrong:
        raise bad_field(where, f"token ids of the target's vocabulary, {len(known)} from 0 to {max(known)}", wrong[0])


def check_sampled_text(completion: Completion, tokenizer: TargetTokenizer) -> RowFlag:
    """Compare the text of the sampled ids with the record's message.

    Returns:
        `UNDECODABLE` where the ids aren't valid UTF-8 other than at the end of a response that was cut, else no flag.

    Raises:
        RecordError: `sampled_ids_mismatch`; the ids spell another text, such as those of another model's tokenizer.
    """
    sampled = tokenizer.token_bytes.decode(completion.output_token_ids or ())
    flag = RowFlag(0)
    try:
        text = sampled.decode()
    except UnicodeDecodeError as error:
        text = sampled.decode(errors="replace")
        cut_inside_character = error.reason == "unexpected end of data" and completion.finish_reason == "length"
        flag = RowFlag(0) if cut_inside_character else RowFlag.UNDECODABLE
    message = completion.messages[-1]
    for field in ("reasoning_content", "content"):
        shown = message.get(field)
        if isinstance(shown, str) and not _shows(shown.strip().rstrip(REPLACEMENT), text, tokenizer):
            raise RecordError(
                Reason.SAMPLED_IDS_MISMATCH,
                f"expected output_token_ids to spell the {field} {shown.strip()[:60]!r}, found {text[:60]!r}. Check "
                f"that the ids come from this record's request and from this tokenizer.",
            )
    return flag


def _shows(shown: str, text: str, tokenizer: TargetTokenizer) -> bool:
    """Whether a server that may leave control tokens out could show `shown` of `text`."""
    if shown in text:
        return True
    for start, end in reversed(tokenizer.controls.spans(text)):
        text = text[:start] + text[end:]
    return shown in text
