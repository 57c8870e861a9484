"""Load a target so that no weight is invented, and find its parts whatever the architecture calls them."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from dflash.errors import ModelError

_LAYER: Final = re.compile(r"(.*?\blayers\.)\d+\.")


def load_model(path: str, dtype: torch.dtype | None, *, trust_remote_code: bool) -> Any:
    """Load a causal language model from a folder or by id, on the CPU.

    Multimodal wrappers load as their text model alone where transformers knows how (Qwen3.5 and Qwen3.6), else whole.

    Raises:
        ModelError: see `Target.load`.
    """
    if dtype == torch.float16:
        raise ModelError(f"{path}: hidden states of real targets outgrow float16; choose bfloat16 or float32")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        remote = getattr(config, "auto_map", None) or {}
        causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote
        model, report = (AutoModelForCausalLM if causal else AutoModelForImageTextToText).from_pretrained(
            path,
            config=config,
            dtype=dtype if dtype is not None else "auto",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # of transformers, safetensors and the architecture, or of the target's own code
        raise ModelError(f"the target {path} can't be loaded: {error}") from error
    _refuse_other_weights(path, model, report)
    return model


def find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder of a causal language model and the list of its layers.

    Raises:
        ModelError: not exactly one list has as many modules as the text configuration has layers.
    """
    decoder: nn.Module = model.get_decoder()
    expected = model.config.get_text_config().num_hidden_layers
    found = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == expected and "." not in name
    }
    if len(found) > 1 and "layers" in found:
        found = {"layers": found["layers"]}
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__}: expected one list of {expected} decoder layers in {type(decoder).__name__}, "
            f"found {sorted(found)}"
        )
    return decoder, next(iter(found.values()))


def find_final_norm(decoder: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head.

    Raises:
        ModelError: the decoder has none under a known name.
    """
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
    for name in names:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise ModelError(f"{type(decoder).__name__} has no final norm under any of the names {list(names)}")


def weight_of(module: Any, what: str) -> Tensor:
    """The weight matrix of an embedding or a head."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise ModelError(f"the target has no {what} with a weight: found {type(module).__name__}")
    return weight


def _refuse_other_weights(path: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse a model part of whose text weights did not come from the checkpoint, or that leaves text layers out.

    A nested text model or an untied head that is silently initialised at random is the classic way to train a drafter
    on noise. Weights outside the text model (a vision tower) may be missing: they never run.
    """
    invented = set(report["missing_keys"]) | {str(item[0]) for item in report["mismatched_keys"]}
    decoder, _ = find_layers(model)
    parts = (decoder, model.get_input_embeddings(), model.get_output_embeddings())
    text = {id(tensor) for part in parts if part is not None for tensor in part.state_dict(keep_vars=True).values()}
    names = [name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in text]
    layers = {match[1] for name in names if (match := _LAYER.match(name))}
    left_out = sorted(
        name for name in report["unexpected_keys"] if (match := _LAYER.match(name)) and match[1] in layers
    )
    if left_out:
        raise ModelError(
            f"the target {path} holds {len(left_out)} weights of text layers that its config.json doesn't describe, "
            f"so another model would run: {left_out[:5]}{' and more' if len(left_out) > 5 else ''}. Check that "
            "config.json belongs to these weights"
        )
    wrong = sorted(invented.intersection(names))
    if wrong or report["error_msgs"]:
        raise ModelError(
            f"the target {path} lacks {len(wrong)} of {len(names)} text weights, which would be random: "
            f"{wrong[:5]}{' and more' if len(wrong) > 5 else ''}; load errors: {report['error_msgs']}. "
            "Expected a complete checkpoint of this architecture; check that the download is whole and that "
            "config.json belongs to it"
        )
