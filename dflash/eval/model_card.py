"""The model card: what a drafter was trained on, for which target, how well it drafts, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dflash.eval.config import ExportRun
from dflash.eval.record import EvaluationRecord
from dflash.eval.subject import Subject
from dflash.eval.table import markdown, markdown_table
from dflash.model.layout import trainable_parameters

CARD: Final = "README.md"
_UNKNOWN: Final = "not recorded"
_LAYOUT, _DIGEST = "weights", "weights SHA-256 (checkpoint)"  # rows that say which export a card belongs to


@dataclass(frozen=True, slots=True)
class Remeasured:
    """tau of the checkpoint and of the exported files, on the same prompts.

    Attributes:
        num_prompts: how many.
        tau_before: of the checkpoint's fp32 weights.
        tau_after: of the weights in the exported file.
    """

    num_prompts: int
    tau_before: float
    tau_after: float


def model_card(
    run: ExportRun,
    subject: Subject,
    evaluation: EvaluationRecord | None,
    target: str | None,
    remeasured: Remeasured | None,
) -> str:
    """Write the card as Markdown with the YAML header that hubs read."""
    return "\n".join(_lines(run, subject, evaluation, target or _UNKNOWN, remeasured)) + "\n"


def is_card_of(card: str, run: ExportRun, weights_sha256: str) -> bool:
    """Whether a card says that its folder is this very export: the weights, their dtype and layout."""
    return all(row in card for row in (f"| {_LAYOUT} | {_layout(run)} |", f"| {_DIGEST} | {weights_sha256} |"))


def _layout(run: ExportRun) -> str:
    return f"{run.dtype}, layout {run.format}"


def _lines(
    run: ExportRun, subject: Subject, evaluation: EvaluationRecord | None, target: str, remeasured: Remeasured | None
) -> Iterator[str]:
    config, data = subject.config, _section(subject.record, "data")
    yield from ("---", f"base_model: {json.dumps(target)}", "tags: [speculative-decoding, dflash]", "---", "")
    yield from (f"# DFlash drafter for {target}", "")
    yield "A block-diffusion drafter for speculative decoding (arXiv 2602.06036). It drafts only for this target."
    yield from ("", "## What it is", "")
    yield _facts(
        {
            "target": target,
            "thinking mode of the training data": _counts(data.get("thinking")),
            "thinking mode of the evaluation": _counts(None if evaluation is None else evaluation.prompts.thinking),
            "parameters": f"{trainable_parameters(config):,}",
            "layers": ", ".join(config.layer_types),
            "block size": f"{config.block_size} (drafts {config.num_draft_tokens} tokens)",
            "sliding window": str(config.sliding_window),
            "target layers (0-based)": ", ".join(map(str, config.target_layer_ids)),
            "mask token id": str(config.mask_token_id),
            _LAYOUT: _layout(run),
        }
    )
    yield from ("", "## Trained on", "")
    yield _facts(_training(subject, data))
    yield from ("", "## Acceptance", "")
    yield "Nobody evaluated this drafter." if evaluation is None else markdown(evaluation)
    yield from ("", _remeasured(remeasured), "", "## How to serve", "", _serving(run, target, config.num_draft_tokens))
    environment = _section(subject.record, "environment")
    yield from ("", "## Environment of the training", "", _facts(dict(sorted(environment.items()))))


def _training(subject: Subject, data: Mapping[str, Any]) -> dict[str, str]:
    train = _section(subject.record, "config")
    optimizer, loss = _section(train, "optimizer"), _section(train, "loss")
    tokens = _section(_section(subject.record, "progress"), "batch").get("num_tokens")
    return {
        "dataset version": str(data.get("manifest", _UNKNOWN)),
        "manifest digest": str(data.get("manifest_digest", _UNKNOWN)),
        "rows": _count(data.get("num_rows")),
        "tokenizer fingerprint": str(data.get("tokenizer_fingerprint", _UNKNOWN)),
        "chat template fingerprint": str(data.get("template_fingerprint", _UNKNOWN)),
        "step": f"{subject.step:,}",
        "tokens seen": _count(tokens),
        "objective": f"{loss.get('objective', _UNKNOWN)}, {loss.get('weighting', _UNKNOWN)}",
        "learning rate": str(optimizer.get("learning_rate", _UNKNOWN)),
        "pack": f"{train.get('pack_tokens', _UNKNOWN)} tokens, {train.get('num_anchors', _UNKNOWN)} anchors",
        "seed": str(train.get("seed", _UNKNOWN)),
        _DIGEST: subject.weights_sha256,
    }


def _remeasured(found: Remeasured | None) -> str:
    if found is None:
        return "The exported file was compared with the checkpoint tensor by tensor; tau was not measured again."
    return (
        f"On {found.num_prompts} prompts tau was {found.tau_before:.3f} with the checkpoint's weights and "
        f"{found.tau_after:.3f} with those of this file."
    )


def _serving(run: ExportRun, target: str, num_draft_tokens: int) -> str:
    settings = json.dumps({"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": num_draft_tokens})
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        "--speculative-draft-model-path DRAFTER"
    )
    vllm = f"vllm serve {target} --speculative-config '{settings}'"
    shown = {"sglang": (sglang, vllm), "vllm": (vllm, sglang), "speculators": (vllm,)}[run.format]
    return "DRAFTER is this folder.\n\n```\n" + "\n".join(shown) + "\n```"


def _section(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a record, which another version may have written; empty where it is none."""
    section = record.get(name)
    return section if isinstance(section, Mapping) else {}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _UNKNOWN


def _counts(counts: Any) -> str:
    if not isinstance(counts, Mapping) or not counts:
        return _UNKNOWN
    return ", ".join(f"{name}: {_count(count)}" for name, count in counts.items())


def _facts(facts: Mapping[str, str]) -> str:
    return markdown_table(("", ""), list(facts.items()))
