"""The drafter as numbers: its configuration, the names and shapes of its tensors, the files that describe them.

Nothing here needs torch, so that plans and memory estimates run on machines without it.

Legend for shapes: H hidden size, I intermediate size, K target layers that feed the drafter, Q query heads, G key/value
heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash.errors import ModelError, UsageError

LayerType = Literal["sliding_attention", "full_attention"]
ExportFormat = Literal["sglang", "vllm", "speculators"]
MAX_LAYERS = 1024  # far above any drafter; a damaged config.json must not allocate by its numbers


class DrafterConfig(BaseModel):
    """Everything that decides the drafter's network; the same object trains, decodes and is exported.

    The rotary embedding is always the plain one with `rope_theta`: a target's partial rotary factor or length scaling
    is never copied, because servers build the drafter's rotary embedding from these fields alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1, description="H, the same as the target's.")
    intermediate_size: int = Field(ge=1, description="I, width of the SwiGLU MLP.")
    num_hidden_layers: int = Field(ge=1, le=MAX_LAYERS, description="Draft layers.")
    num_attention_heads: int = Field(ge=1, description="Q, query heads.")
    num_key_value_heads: int = Field(ge=1, description="G, key/value heads.")
    head_dim: int = Field(ge=2, description="D, size of one head.")
    vocab_size: int = Field(ge=1, description="Rows of the target's embedding and head.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Epsilon of every RMSNorm.")
    rope_theta: float = Field(gt=0, description="Base of the plain rotary embedding.")
    max_position_embeddings: int = Field(ge=1, description="Longest document in tokens.")
    block_size: int = Field(ge=2, description="Slots of a block; slot 0 is the anchor, the others are predicted.")
    mask_token_id: int = Field(ge=0, description="Id whose embedding fills slots 1 and later.")
    target_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="0-based decoder layers of the target whose outputs are the features, ascending."
    )
    num_target_layers: int = Field(ge=1, description="Decoder layers of the target.")
    layer_types: tuple[LayerType, ...] = Field(description="Attention of each draft layer.")
    sliding_window: int | None = Field(default=None, ge=1, description="Positions that a sliding layer sees.")
    tie_word_embeddings: bool = Field(default=False, description="Whether the target's head is its embedding.")
    eos_token_id: int | tuple[int, ...] | None = Field(default=None, description="End ids of the target.")
    pad_token_id: int | None = Field(default=None, description="Padding id of the target.")
    bos_token_id: int | None = Field(default=None, description="Start id of the target.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what no server could load or what would silently mean something else."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads can't share {self.num_key_value_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} has no row in an embedding of {self.vocab_size}")
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise ValueError(f"target_layer_ids must ascend within 0..{self.num_target_layers - 1}, found {list(ids)}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"expected {self.num_hidden_layers} layer_types, found {len(self.layer_types)}")
        slides = "sliding_attention" in self.layer_types
        if slides != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window {self.sliding_window} doesn't go with layer_types {list(self.layer_types)}: "
                "set it exactly when a layer is sliding_attention"
            )
        return self

    @property
    def num_slots(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.block_size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block drafts: every slot but the anchor's."""
        return self.block_size - 1

    @property
    def num_target_features(self) -> int:
        """K, how many target layers feed the drafter."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """Values of one token's features, K * H."""
        return self.num_target_features * self.hidden_size

    @classmethod
    def for_target(cls, text_config: Any, **choices: Any) -> Self:
        """Derive a drafter for a target; every field can be chosen, the rest follows the target.

        Args:
            text_config: the target's text configuration (`get_text_config()` of a transformers configuration).
            **choices: fields of this class, `mask_token_id` at least, and `num_target_features` (default 5), which
                counts the default layer ids. Unless chosen: 5 layers, blocks of 16, full attention, or with a
                `sliding_window` sliding layers and a full last one.

        Raises:
            ModelError: a choice is unknown, missing or doesn't fit.
        """
        num_features = choices.pop("num_target_features", 5)
        fields = _fields_from_target(text_config) | {"num_hidden_layers": 5, "block_size": 16} | choices
        if fields.get("target_layer_ids") is None:
            fields["target_layer_ids"] = default_target_layer_ids(fields["num_target_layers"], num_features)
        if fields.get("layer_types") is None:
            inner = "sliding_attention" if fields.get("sliding_window") is not None else "full_attention"
            few = min(fields["num_hidden_layers"], MAX_LAYERS + 1)  # more are refused, not listed first
            fields["layer_types"] = (inner,) * (few - 1) + ("full_attention",)
        return cls._validated(fields, "the drafter's choices")

    @classmethod
    def from_official(cls, config: Mapping[str, Any]) -> Self:
        """Read the `config.json` that servers load (architecture `DFlashDraftModel`).

        Raises:
            ModelError: a field is missing, or says something this network doesn't do.
        """
        _refuse_foreign(config)
        draft = _section(config, "dflash_config")
        fields = {name: config[name] for name in cls.model_fields if config.get(name) is not None}
        fields["rope_theta"] = _rope_theta(config)
        fields["mask_token_id"] = draft.get("mask_token_id")
        fields["target_layer_ids"] = draft.get("target_layer_ids")
        fields["block_size"] = config.get("block_size") or draft.get("block_size")
        num_layers = config.get("num_hidden_layers")
        if not fields.get("layer_types") and isinstance(num_layers, int) and num_layers <= MAX_LAYERS:
            fields["layer_types"] = ("full_attention",) * num_layers
        if not config.get("use_sliding_window", True):
            fields.pop("sliding_window", None)
        return cls._validated(fields, "config.json of the drafter")

    def to_official(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The `config.json` that SGLang and vLLM load."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **self.transformer_fields(),
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": dtype,
        }

    def transformer_fields(self) -> dict[str, Any]:
        """The Qwen3 part of the configuration, with the rotary base under both names that readers look for."""
        own = (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "layer_types"),
            *("sliding_window", "tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id"),
        )
        values = self.model_dump(mode="json")
        return {
            **{name: values[name] for name in own},
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
        }

    @classmethod
    def _validated(cls, fields: Mapping[str, Any], what: str) -> Self:
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc']) or 'fields'}: {item['msg']}" for item in error.errors()
            )
            raise ModelError(f"{what} can't describe a drafter: {problems}") from error


def default_target_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Evenly spread layer ids from 1 to n-3; the middle layer when only one is wanted.

    Raises:
        UsageError: the target has too few layers for that many distinct ids.
    """
    if num_features < 1 or num_target_layers < 1:
        raise UsageError(
            f"layer ids need at least one feature and one layer, found {num_features} and {num_target_layers}"
        )
    if num_features > num_target_layers:
        raise UsageError(
            f"a target of {num_target_layers} layers has no {num_features} distinct layer ids: lower "
            "num_target_features"
        )
    if num_features == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_features - 1)) for i in range(num_features))
    if len(set(ids)) < num_features or ids[-1] < ids[0]:
        raise UsageError(
            f"a target of {num_target_layers} layers has no {num_features} distinct default layer ids "
            f"(the rule gives {list(ids)}): choose target_layer_ids yourself"
        )
    return ids


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all trainable tensors, which are exactly those of the official checkpoint.

    58 tensors for 5 layers; the embedding and the head are the target's and not among them.
    """
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def trainable_parameters(config: DrafterConfig) -> int:
    """Number of trained values; 1.730 billion for the Qwen3.6-27B drafter."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _fields_from_target(text_config: Any) -> dict[str, Any]:
    """The fields that a drafter takes over from its target unless chosen otherwise."""
    heads = text_config.num_attention_heads
    return {
        "hidden_size": text_config.hidden_size,
        "intermediate_size": text_config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text_config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        "vocab_size": text_config.vocab_size,
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", 1e-6),
        "rope_theta": _target_rope_theta(text_config),
        "max_position_embeddings": text_config.max_position_embeddings,
        "num_target_layers": text_config.num_hidden_layers,
        "tie_word_embeddings": bool(getattr(text_config, "tie_word_embeddings", False)),
        "eos_token_id": getattr(text_config, "eos_token_id", None),
        "pad_token_id": getattr(text_config, "pad_token_id", None),
        "bos_token_id": getattr(text_config, "bos_token_id", None),
    }


def _target_rope_theta(text_config: Any) -> float:
    """The rotary base of a target, wherever its transformers version keeps it."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters and "full_attention" in parameters:  # models with a base for each layer type
        parameters = parameters["full_attention"] or {}
    return float(parameters.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10_000.0)


def _refuse_foreign(config: Mapping[str, Any]) -> None:
    """Refuse settings of a `config.json` that this network would silently ignore."""
    parameters, scaling = _section(config, "rope_parameters"), _section(config, "rope_scaling")
    allowed: dict[str, tuple[Any, ...]] = {
        "architectures": (["DFlashDraftModel"],),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "partial_rotary_factor": (1, 1.0),
        "rope_type": ("default",),
    }
    found = [(name, config.get(name)) for name in allowed]
    found += [("partial_rotary_factor", parameters.get("partial_rotary_factor"))]
    found += [("rope_type", value) for value in (parameters.get("rope_type"), *map(scaling.get, ("rope_type", "type")))]
    wrong = {name: value for name, value in found if value is not None and value not in allowed[name]}
    if wrong:
        raise ModelError(
            f"config.json describes a drafter this network can't run: {wrong}; expected DFlashDraftModel with silu, "
            "no attention bias and plain rotary embeddings"
        )


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """The rotary base; the two places that may name it must agree."""
    places = (config.get("rope_theta"), _section(config, "rope_parameters").get("rope_theta"))
    named = [place for place in places if place is not None]
    if any(place != named[0] for place in named):
        raise ModelError(f"config.json has rope_theta {places[0]} but rope_parameters.rope_theta {places[1]}")
    return named[0] if named else None


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of a `config.json`; absent and null are empty."""
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ModelError(f"config.json: expected an object at {name}, found {type(section).__name__}")
    return section
