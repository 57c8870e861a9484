"""The sizes of a target as numbers, so that a plan needs neither its weights nor a network."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash.config import RunModel


class TargetNumbers(RunModel):
    """Table `[target_shape]` of a run file: what `config.json` of the target says, and its parameters.

    Field names are those of transformers, so that a drafter is derived from it as from a real configuration.
    """

    num_parameters: int = Field(ge=1, description="Of the text model, embedding and head included.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    intermediate_size: int = Field(ge=1, description="Width of the MLP; of the active experts where it has experts.")
    num_hidden_layers: int = Field(ge=1, description="Decoder layers.")
    num_attention_heads: int = Field(ge=1, description="Query heads of its full attention.")
    num_key_value_heads: int = Field(ge=1, description="Key/value heads.")
    head_dim: int = Field(ge=2, description="Size of one head.")
    vocab_size: int = Field(ge=1, description="Rows of the embedding.")
    max_position_embeddings: int = Field(ge=1, description="Longest context.")
    rope_theta: float = Field(gt=0, description="Base of the rotary embedding.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Epsilon of its norms.")
    tie_word_embeddings: bool = Field(default=False, description="Whether the head is the embedding.")
    eos_token_id: int | None = Field(default=None, description="End of a turn.")
    pad_token_id: int | None = Field(default=None, description="Padding.")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="As which it is loaded.")

    @property
    def bytes_per_value(self) -> int:
        """Bytes of one weight."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]
