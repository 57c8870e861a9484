"""Loading tokenizers: refusals, fingerprints, and no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash.data.encoder_probes import TEXT_PROBES
from dflash.data.tokenizer import TOKENIZER_FILE, TargetTokenizer, adapt_tokenizer, load_tokenizer
from dflash.errors import TokenizerError

# The same with every supported version of transformers: a dataset made with one can be merged with another's.
SMOLLM2_FINGERPRINT = "f6366b12dc103962e18d4dbec7853a8139c6579146c110a70372770aa1e20ab6"
QWEN36_FINGERPRINT = "5b3fe8a6a8d5331e43730db245bf9876580d0d06d1e4485bdae072356d501b0e"


@pytest.fixture
def folder(smollm2_tokenizer_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(smollm2_tokenizer_dir, tmp_path / "tokenizer"))


def _edit(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **fields}))


def test_loads_without_torch(smollm2_tokenizer_dir: Path) -> None:
    code = (
        "import sys; from dflash.data.tokenize import tokenize_completion;"
        "from dflash.data.tokenizer import load_tokenizer;"
        f"t = load_tokenizer({str(smollm2_tokenizer_dir)!r});"
        "m = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a b c'}];"
        "assert tokenize_completion({'messages': m}, t) is not None; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_special_ids(smollm2: TargetTokenizer, qwen36: TargetTokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.eos_token_id) == (49152, 2)
    assert (qwen36.vocab_size, qwen36.eos_token_id) == (248077, 248046)
    assert "</think>" not in qwen36.controls.ids
    assert {248044, 248045, 248046} <= qwen36.special_ids


def test_fingerprints_do_not_depend_on_the_library(smollm2: TargetTokenizer, qwen36: TargetTokenizer) -> None:
    assert (smollm2.fingerprint, qwen36.fingerprint) == (SMOLLM2_FINGERPRINT, QWEN36_FINGERPRINT)


def test_fingerprint_ignores_formatting_and_sees_changes(folder: Path) -> None:
    first = load_tokenizer(folder)
    definition = json.loads((folder / TOKENIZER_FILE).read_text())
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition, indent=1, sort_keys=True))
    assert load_tokenizer(folder).fingerprint == first.fingerprint
    definition["added_tokens"][-1]["special"] = False
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition))
    assert load_tokenizer(folder).fingerprint != first.fingerprint


def test_template_fingerprint_sees_the_template_alone(folder: Path) -> None:
    first = load_tokenizer(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    second = load_tokenizer(folder)
    assert second.template_fingerprint != first.template_fingerprint
    assert second.fingerprint == first.fingerprint


def test_template_from_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert load_tokenizer(folder).template.source == "{{ messages[0].content }}"


def test_no_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer(folder)


def test_missing_folder_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="No tokenizer folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"No tokenizer\.json in"):
        load_tokenizer(tmp_path)


def test_damaged_file_is_refused(folder: Path) -> None:
    path = folder / TOKENIZER_FILE
    path.write_bytes(path.read_bytes()[: 1 << 20])
    with pytest.raises(TokenizerError, match="can't be loaded"):
        load_tokenizer(folder)


def test_other_ids_than_the_definition_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class named in the configuration may bring other rules; here the loaded tokenizer gets them by hand."""
    changed = PreTrainedTokenizerFast.from_pretrained(folder)
    changed.backend_tokenizer.pre_tokenizer = None
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda *_, **__: changed)
    with pytest.raises(TokenizerError, match="gives other ids than its tokenizer"):
        load_tokenizer(folder)


def test_configured_class_with_older_rules_does_not_change_ids(folder: Path, smollm2: TargetTokenizer) -> None:
    _edit(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    text = "नमस्ते 1234 x"
    expected = smollm2.backend.encode(text, add_special_tokens=False).ids
    assert load_tokenizer(folder).backend.encode(text, add_special_tokens=False).ids == expected


def test_slow_tokenizer_is_refused() -> None:
    class Slow(PreTrainedTokenizerFast):
        backend_tokenizer = None

        def __init__(self) -> None:
            self.name_or_path = "slow"

    with pytest.raises(TokenizerError, match="isn't a fast one"):
        adapt_tokenizer(Slow())


def test_truncation_of_the_definition_is_off(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(folder).backend.encode("a b c d e f g").ids) == 7


def test_a_vocabulary_with_gaps(gapped: TargetTokenizer, smollm2: TargetTokenizer) -> None:
    assert (gapped.vocab_size, gapped.known_ids) == (6, {0, 1, 5})
    assert gapped.token_bytes.decode([1, 3, 5, 9]) == b"yes!"
    assert smollm2.known_ids == range(49152)


def test_the_proof_can_be_left_to_the_process_that_made_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = PreTrainedTokenizerFast.from_pretrained(folder)
    changed.backend_tokenizer.pre_tokenizer = None
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda *_, **__: changed)
    assert load_tokenizer(folder, probe=False).backend.pre_tokenizer is None
    with pytest.raises(TokenizerError, match="gives other ids than its tokenizer"):
        load_tokenizer(folder)


def test_a_template_that_reads_the_clock_is_warned_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    load_tokenizer(folder, probe=False)
    assert caplog.messages == []
    load_tokenizer(folder)
    (message,) = caplog.messages
    assert "the clock stands at 2025-01-01" in message


def test_longest_token_bounds_bytes(qwen36: TargetTokenizer, smollm2: TargetTokenizer) -> None:
    assert qwen36.token_bytes.longest == 128
    for tokenizer in (qwen36, smollm2):
        text = "é नमस्ते\n</think> 漢字 <|im_end|> \U0001f600 x"
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.token_bytes.decode(ids).decode() == text


def test_a_tokenizer_that_is_its_file_to_the_letter_needs_no_second_load(
    smollm2: TargetTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers changed anything, the file's own ids are asked for, as far as texts can tell them apart."""
    assert not smollm2.is_its_definition  # transformers leaves out the post-processor
    (folder / TOKENIZER_FILE).write_text(smollm2.backend.to_str(pretty=True))
    monkeypatch.setattr("dflash.data.tokenizer._require_same_ids", None)
    assert load_tokenizer(folder).is_its_definition


def test_the_fast_encoder_reads_joined_merges_where_they_say_the_same(
    smollm2: TargetTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = json.loads(smollm2.backend.to_str())
    pairs = definition["model"]["merges"]
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition))
    read: list[str] = []

    def build(text: str) -> NoReturn:
        read.append(text)
        raise ValueError("built enough")

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=build)))
    target = load_tokenizer(folder)
    fingerprint = target.fingerprint
    target.prepare_encoder()
    joined = json.loads(read[0])["model"]["merges"]
    assert [merge.split(" ") for merge in joined] == pairs
    for text in TEXT_PROBES:
        assert Tokenizer.from_str(read[0]).encode(text).ids == smollm2.backend.encode(text).ids
    (folder / TOKENIZER_FILE).write_text(read[0])
    assert load_tokenizer(folder).fingerprint == fingerprint


def test_merges_with_a_space_inside_stay_pairs(smollm2: TargetTokenizer, folder: Path) -> None:
    definition = json.loads(smollm2.backend.to_str())
    model = definition["model"]
    model["vocab"]["a b"] = len(model["vocab"])
    model["vocab"][" b"] = len(model["vocab"])
    model["merges"].append(["a", " b"])
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition))
    target = load_tokenizer(folder)
    assert target.is_its_definition
    assert json.loads(target._rules.joined.decode())["model"]["merges"] == model["merges"]


def test_what_only_looks_like_merges_is_left_alone(folder: Path) -> None:
    vocab = {"[UNK]": 0, "a": 1, "b": 2}
    model = {"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "merges": [1, 2]}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    _edit(folder / TOKENIZER_FILE, model=model, pre_tokenizer=None, decoder=None, added_tokens=[])
    assert json.loads(load_tokenizer(folder)._rules.joined)["model"]["merges"] == [1, 2]
