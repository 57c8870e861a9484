"""A target folder, prompts and a checkpoint of a run, all tiny and made here, as commands and flows take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from dflash.model.drafter import Drafter
from dflash.model.layout import DrafterConfig
from dflash.train.checkpoint import CheckpointFolder, Snapshot
from dflash.train.config import TrainConfig
from dflash.train.environment import fingerprint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
PROMPTS = [
    {"id": "a", "source": "maths", "messages": [{"role": "user", "content": "2+2?"}]},
    {"id": "b", "source": "code", "messages": [{"role": "user", "content": "def f"}]},
    {
        "id": "c",
        "source": "maths",
        "messages": [{"role": "user", "content": "1+3?"}, {"role": "assistant", "content": "4"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


def write_target(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer of 300 ids, an embedding of 320 rows, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.4,
        tie_word_embeddings=True, eos_token_id=256, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_prompts(path: Path, records: Sequence[dict[str, Any]] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@dataclass(frozen=True)
class SmallRun:
    """A run folder with checkpoints."""

    folder: Path
    target: Path
    prompts: Path

    def save(self, step: int, seed: int = 0, **data: str) -> Path:
        """Add a checkpoint as the loop writes it; `data` replaces what it says about its data."""
        config = drafter_config()
        drafter = Drafter(config)
        drafter.initialize(torch.Generator().manual_seed(seed), std=0.2)
        record = {
            "progress": {"step": step, "batch": {"num_tokens": 1234}},
            "config": TrainConfig().model_dump(mode="json"),
            "drafter": config.model_dump(mode="json"),
            "halved": False,
            "environment": fingerprint(),
            "data": {
                "dataset": str(self.folder.parent / "moved"), "version": 3, "num_rows": 77,
                "manifest": "v000003-abcdefabcdef", "manifest_digest": "f" * 64,
                "thinking": {"off": 77}, "target": str(self.target), **data,
            },
        }  # fmt: skip
        return CheckpointFolder(self.folder / "checkpoints").save(Snapshot(step, drafter.state_dict(), {}, record))


def drafter_config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=320, rope_theta=10_000.0, max_position_embeddings=512, block_size=4,
        mask_token_id=310, target_layer_ids=(0, 2), num_target_layers=4, layer_types=("full_attention",),
        tie_word_embeddings=True, eos_token_id=256,
    )  # fmt: skip
