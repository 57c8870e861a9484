from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from dflash.config import TokenizeOptions
from dflash.data.dataset import DatasetRoot
from dflash.data.inspect import (
    BROKEN,
    CONTEXT,
    CONTROL,
    LOSS,
    LOSS_CONTROL,
    Sample,
    load_sample,
    load_sample_from_file,
    render_sample,
)
from dflash.data.rows import RowFlag, TokenizedRows
from dflash.data.shards import ShardWriter
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import UsageError
from dflash.manifest import Counts, Manifest, ShardEntry, TokenizerRecord, sha256_hex

Part = tuple[str, bool]


def encode(tokenizer: TargetTokenizer, parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    for text, in_loss in parts:
        new = tokenizer.backend.encode(text, add_special_tokens=False).ids
        ids += new
        mask += [in_loss] * len(new)
    return ids, mask


def make_sample(ids: Sequence[int], mask: Sequence[bool], sample_id: str = "a-1", source: str = "chat") -> Sample:
    return Sample(0, "shard row 0", sample_id, source, np.array(ids, np.int32), np.array(mask, np.bool_))


def spans(text: Text, style: str) -> list[str]:
    """What is written in a style below the header."""
    body = text.plain.index("\n\n") + 2
    return [text.plain[span.start : span.end] for span in text.spans if span.style == style and span.start >= body]


CHAT: list[Part] = [
    ("<|im_start|>user\nHi  there<|im_end|>\n<|im_start|>assistant\n", False),
    ("Namaste नमस्ते,\n\tyou", True),
    ("<|im_end|>", True),
    ("\n", False),
]


class TestRendering:
    def test_loss_is_coloured_and_control_tokens_are_visible(self, smollm2: TargetTokenizer) -> None:
        text = render_sample(make_sample(*encode(smollm2, CHAT)), smollm2)
        assert "".join(spans(text, LOSS)) == "Namaste·नमस्ते,⏎\n→\tyou"
        assert spans(text, LOSS_CONTROL) == ["<|im_end|>"]
        assert spans(text, CONTROL) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
        assert "".join(spans(text, CONTEXT)) == "user\nHi  there\nassistant\n\n"

    def test_without_colour_loss_is_bracketed(self, smollm2: TargetTokenizer) -> None:
        text = render_sample(make_sample(*encode(smollm2, CHAT)), smollm2, colour=False)
        assert text.plain.endswith("<|im_start|>assistant\n⟦Namaste·नमस्ते,⏎\n→\tyou<|im_end|>⟧\n")
        assert not text.spans
        unfinished = make_sample(*encode(smollm2, CHAT[:2]))
        assert render_sample(unfinished, smollm2, colour=False).plain.endswith("you⟧")

    def test_a_terminal_gets_colours(self, smollm2: TargetTokenizer) -> None:
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, color_system="standard", width=100)
        console.print(render_sample(make_sample(*encode(smollm2, CHAT)), smollm2))
        assert "\x1b[32mNamaste" in screen.getvalue()
        assert "\x1b[1;30;42m<|im_end|>" in screen.getvalue()

    def test_a_character_of_several_tokens_is_one_character(self, smollm2: TargetTokenizer) -> None:
        ids, mask = encode(smollm2, [("🧑\u200d🚀 धृ", True)])
        assert len(ids) > 6
        assert spans(render_sample(make_sample(ids, mask), smollm2), LOSS) == ["🧑\u200d🚀·धृ"]

    def test_a_mask_that_cuts_a_character_shows_it(self, smollm2: TargetTokenizer) -> None:
        ids, _ = encode(smollm2, [("🧿", True)])
        assert len(ids) > 1
        text = render_sample(make_sample(ids, [True] + [False] * (len(ids) - 1)), smollm2)
        assert "\ufffd" in spans(text, LOSS)[0]

    def test_hostile_text_can_not_steer_the_terminal(self, smollm2: TargetTokenizer) -> None:
        ids, mask = encode(smollm2, [("\x1b]0;owned\x07 [red]no markup[/red] \u202eabc", True)])
        text = render_sample(make_sample(ids, mask, "\x1b[2J\nid", "\x07"), smollm2).plain
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
        assert "\\x1b]0;owned\\x07·[red]no·markup[/red]·\\u202eabc" in text
        assert "id \\x1b[2J\\nid" in text

    def test_ids_outside_the_vocabulary_are_shown(self, smollm2: TargetTokenizer) -> None:
        text = render_sample(make_sample([28, 999_999, -1, 28], [False, True, True, True]), smollm2)
        assert spans(text, BROKEN) == ["<id 999999 is not in the vocabulary><id -1 is not in the vocabulary>"]

    def test_an_empty_row_is_shown(self, smollm2: TargetTokenizer) -> None:
        assert "0 tokens, 0 loss tokens" in render_sample(make_sample([], []), smollm2).plain


def write_shard(folder: Path, names: Sequence[str]) -> tuple[ShardEntry, Path, Path]:
    count = len(names)
    folder.mkdir(parents=True)
    rows = TokenizedRows(
        ids=np.arange(4 * count, dtype=np.int32),
        offsets=np.arange(count + 1, dtype=np.int64) * 4,
        mask=np.tile([False, False, True, True], count),
        sample_ids=names,
        sources=["chat"] * count,
        num_loss_tokens=np.full(count, 2, np.int32),
        output_tokens=np.array([-1, *range(1, count)], np.int32),
        finish_reasons=["length"] * count,
        flags=np.full(count, RowFlag.LENGTH_CUT | RowFlag.SAMPLED_IDS, np.uint16),
        scripts=["latin"] * count,
    )
    with ShardWriter(folder / "shard.arrow", folder / "index.arrow", rows_per_batch=3) as writer:
        writer.write(rows)
        written = writer.close()
    entry = ShardEntry(
        sha256=written.shard.sha256,
        num_bytes=written.shard.num_bytes,
        num_rows=count,
        num_tokens=4 * count,
        num_loss_tokens=2 * count,
        index_sha256=written.index.sha256,
        index_bytes=written.index.num_bytes,
        fingerprint=sha256_hex(str(folder).encode()),
        encoder="test",
    )
    return entry, written.shard.path, written.index.path


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[DatasetRoot, Manifest]:
    """Two shards of seven and five rows."""
    root = DatasetRoot.open(str(tmp_path / "root"), cache=tmp_path / "cache")
    entries = []
    for name, count in (("a", 7), ("b", 5)):
        entry, shard, index = write_shard(tmp_path / name, [f"{name}-{row}" for row in range(count)])
        root.store.put_if_absent(entry.key, shard)
        root.meta.put_if_absent(entry.index_key, index)
        entries.append(entry)
    manifest = Manifest(
        version=1,
        parent=None,
        created_at=datetime(2026, 11, 30, tzinfo=UTC),
        schema_version=1,
        code_version=1,
        tokenizer=TokenizerRecord(name="t", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=49_152),
        options=TokenizeOptions(),
        shards=tuple(entries),
        batches=(),
        counts=Counts.of(entries),
        quality={},
    )
    return root, manifest


class TestLoading:
    @pytest.mark.parametrize(
        ("key", "name", "number", "row"),
        [(0, "a-0", 0, 0), (6, "a-6", 6, 6), (7, "b-0", 7, 0), ("b-4", "b-4", 11, 4), ("a-3", "a-3", 3, 3)],
    )
    def test_by_number_and_by_id(
        self, dataset: tuple[DatasetRoot, Manifest], key: int | str, name: str, number: int, row: int
    ) -> None:
        root, manifest = dataset
        sample = load_sample(root, manifest, key)
        assert (sample.sample_id, sample.number) == (name, number)
        assert sample.place == f"{manifest.shards[name.startswith('b')].key} row {row}"
        assert sample.input_ids.tolist() == list(range(4 * row, 4 * row + 4))
        assert sample.loss_mask.tolist() == [False, False, True, True]

    def test_only_the_shard_that_holds_the_sample_is_read(
        self, dataset: tuple[DatasetRoot, Manifest], tmp_path: Path
    ) -> None:
        root, manifest = dataset
        (tmp_path / "root" / manifest.shards[0].key).unlink()
        assert load_sample(root, manifest, "b-1").sample_id == "b-1"
        assert load_sample(root, manifest, 8).sample_id == "b-1"

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            (12, "no sample number 12: expected 0 to 11"),
            (-1, "expected 0 to 11"),
            ("a-9", "no sample with the id 'a-9'"),
        ],
    )
    def test_what_is_not_there_is_a_usage_error(
        self, dataset: tuple[DatasetRoot, Manifest], key: int | str, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            load_sample(*dataset, key)

    def test_json_and_facts(self, dataset: tuple[DatasetRoot, Manifest], smollm2: TargetTokenizer) -> None:
        sample = load_sample(*dataset, "a-2")
        document = json.loads(json.dumps(sample.to_json()))
        assert document["flags"] == ["length_cut", "sampled_ids"]
        assert (document["output_tokens"], document["num_loss_tokens"], document["number"]) == (2, 2, 2)
        text = render_sample(sample, smollm2).plain
        assert "output_tokens 2  finish_reason length  script latin  flags length_cut, sampled_ids" in text
        assert "output_tokens unknown" in render_sample(load_sample(*dataset, 0), smollm2).plain

    def test_a_shard_file_by_itself(self, tmp_path: Path) -> None:
        _, path, _ = write_shard(tmp_path / "c", [f"c-{row}" for row in range(8)])
        assert load_sample_from_file(path, 4).sample_id == "c-4"
        assert load_sample_from_file(path, "c-7").number == 7
        assert load_sample_from_file(path, "c-7").input_ids.tolist() == [28, 29, 30, 31]
        for key in (8, -1, "nothing"):
            with pytest.raises(UsageError, match="has no sample"):
                load_sample_from_file(path, key)
