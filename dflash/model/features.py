"""The target: any causal language model of transformers, and the hidden states of a few of its layers.

Feature k of a token is the output of decoder layer `layer_ids[k]` (0-based, before any final norm), concatenated over
the layers. Nothing is shifted: row s of the features belongs to id s of the row.

Three choices:

* Layers are read by forward hooks and the forward pass ends with a private exception in the hook of the last one. The
  alternatives are worse: cutting the layer list would break the same model for decoding, and running the layers one by
  one would repeat each architecture's masks and rotary embeddings. An exception needs to know neither, and no layer
  after the last chosen one runs, no final norm, no head.
* Documents of a packed row run as right-padded batches without any mask, documents of similar length together. Causal
  attention and recurrent layers alike never look to the right, so a document's features can't depend on padding or on
  its neighbours in any architecture, hybrid ones and remote code included, and attention keeps its fast causal kernel.
  A block-diagonal mask would leak through recurrent states and cost the square of the whole row.
* The model runs in inference mode but writes into ordinary tensors, because the drafter's backward pass reads them.

Legend for shapes: S tokens of a packed row, b rows of a padded batch, X tokens of its longest row, K chosen layers,
H hidden size, F = K * H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import ModelError
from dflash.model.target_loading import find_final_norm, find_layers, load_model, weight_of

# Padding that a batch of documents may hold, as a share of its tokens. Fewer, larger batches cost padding: with an
# eighth, eight documents of 100 to 1,000 tokens make about four batches.
MAX_PADDING = 0.125

Hook = Callable[[nn.Module, Any, Any], None]
Write = Callable[[int, Tensor], None]


class _LastLayerReached(Exception):  # noqa: N818 - a signal, not an error
    """All wanted hidden states are there; nothing after them needs to run."""


@dataclass(slots=True)
class Capture:
    """Hidden states that a forward pass of `Target.model` left behind, see `Target.capture`."""

    layer_ids: tuple[int, ...]
    hidden: dict[int, Tensor] = field(default_factory=dict)

    def features(self) -> Tensor:
        """Features [b, X, F] of the tokens that the last forward pass processed."""
        missing = [layer for layer in self.layer_ids if layer not in self.hidden]
        if missing:
            raise ModelError(f"no hidden state of layers {missing}: run the target's model inside the capture first")
        return torch.cat([self.hidden[layer] for layer in self.layer_ids], dim=-1)


class Target:
    """A frozen target model. Not for use by several threads at once: hooks belong to the model.

    Attributes:
        model: the causal language model, for decoding.
        layer_ids: the chosen layers, ascending.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.text_config: Any = model.config.get_text_config()
        self._decoder, self._layers = find_layers(model)
        self.layer_ids = tuple(layer_ids)
        in_order = list(self.layer_ids) == sorted(set(self.layer_ids))
        if not self.layer_ids or not in_order or self.layer_ids[0] < 0 or self.layer_ids[-1] >= self.num_layers:
            raise ModelError(f"target layer ids must ascend within 0..{self.num_layers - 1}, found {list(layer_ids)}")

    @classmethod
    def load(
        cls,
        path: str,
        layer_ids: Sequence[int],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load a target from a local folder or by its Hugging Face id.

        Args:
            path: folder or id.
            layer_ids: 0-based layers whose outputs are the features.
            device: where the whole model goes.
            dtype: of weights and features; the checkpoint's own when None. Not fp16: hidden states outgrow it.
            trust_remote_code: run code that comes with the checkpoint.

        Raises:
            ModelError: it can't be loaded, or some text weight would be newly initialised.
        """
        model = load_model(path, dtype, trust_remote_code=trust_remote_code)
        return cls(model.to(device), layer_ids)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.embedding_VH.shape[1])

    @property
    def feature_size(self) -> int:
        """F = K * H."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def device(self) -> torch.device:
        """Where ids go and features come from."""
        return self.embedding_VH.device

    @property
    def embedding_VH(self) -> Tensor:
        """Input embedding."""
        return weight_of(self.model.get_input_embeddings(), "input embedding")

    @property
    def head_VH(self) -> Tensor:
        """Output head; the very tensor of the embedding where they are tied."""
        return weight_of(self.model.get_output_embeddings(), "output head")

    def features(
        self, input_ids_S: Tensor, position_S: Tensor | None = None, document_S: Tensor | None = None
    ) -> Tensor:
        """Features of a packed row, each document on its own.

        Args:
            input_ids_S: int64.
            position_S: position in its own document; checked when given, and it alone tells documents apart when
                `document_S` is absent.
            document_S: number of each token's document, contiguous; negative marks padding, whose features are zero.

        Returns:
            [S, F] on the target's device, in its dtype, usable in a backward pass.

        Raises:
            ModelError: ids, positions or documents don't belong together or aren't the target's.
        """
        return self._packed(input_ids_S, _spans(input_ids_S, position_S, document_S), final=False)[0]

    def features_and_final(
        self, input_ids_S: Tensor, position_S: Tensor | None = None, document_S: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features [S, F] and the final-normed states [S, H] that the head reads, for losses that need its logits."""
        features_SF, final = self._packed(input_ids_S, _spans(input_ids_S, position_S, document_S), final=True)
        assert final is not None
        return features_SF, final

    def features_padded(self, ids_bX: Tensor, lengths: Sequence[int]) -> Tensor:
        """Features [b, X, F] of right-padded rows; zero at the padding."""
        num_rows, longest = ids_bX.shape
        if len(lengths) != num_rows or not all(0 < length <= longest for length in lengths):
            raise ModelError(f"expected {num_rows} lengths from 1 to {longest}, found {list(lengths)}")
        spans = [(row * longest, row * longest + length) for row, length in enumerate(lengths)]
        return self._packed(ids_bX.flatten(), spans, final=False)[0].view(num_rows, longest, -1)

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Keep the chosen hidden states of whole forward passes of `model`, for decoding.

        Each pass replaces what the one before it left.
        """
        taken = Capture(self.layer_ids)

        def write(index: int, hidden_bXH: Tensor) -> None:
            taken.hidden[self.layer_ids[index]] = hidden_bXH

        with self._hooks(write, stop_after=None):
            yield taken

    def _packed(self, ids_S: Tensor, spans: list[tuple[int, int]], *, final: bool) -> tuple[Tensor, Tensor | None]:
        """Run the documents at `spans` and write their states where their ids are."""
        self._check_ids(ids_S)
        ids_S = ids_S.to(self.device)
        dtype, size = self.embedding_VH.dtype, self.hidden_size
        features_SF = torch.zeros(ids_S.numel(), self.feature_size, dtype=dtype, device=self.device)
        final_SH = torch.zeros(ids_S.numel(), size, dtype=dtype, device=self.device) if final else None
        for group in similar_lengths(spans):
            longest = max(end - start for start, end in group)
            ids_bX = ids_S.new_zeros(len(group), longest)
            for row, (start, end) in enumerate(group):
                ids_bX[row, : end - start] = ids_S[start:end]

            def write(index: int, hidden_bXH: Tensor, group: list[tuple[int, int]] = group) -> None:
                whole = final_SH if index == len(self.layer_ids) else features_SF[:, index * size : (index + 1) * size]
                assert whole is not None
                for row, (start, end) in enumerate(group):
                    whole[start:end] = hidden_bXH[row, : end - start]

            self._run(ids_bX, write, final=final)
        return features_SF, final_SH

    def _run(self, ids_bX: Tensor, write: Write, *, final: bool) -> None:
        """One forward pass as far as the last state that is wanted."""
        expected = (*ids_bX.shape, self.hidden_size)
        num_written = 0

        def write_checked(index: int, hidden_bXH: Tensor) -> None:
            nonlocal num_written
            if tuple(hidden_bXH.shape) != expected:
                raise ModelError(f"expected hidden states {expected} for the ids, found {tuple(hidden_bXH.shape)}")
            write(index, hidden_bXH)
            num_written += 1

        last = len(self.layer_ids) - (0 if final else 1)
        with torch.inference_mode(), self._hooks(write_checked, stop_after=last), suppress(_LastLayerReached):
            self._decoder(input_ids=ids_bX, use_cache=False)
        assert num_written == last + 1

    @contextmanager
    def _hooks(self, write: Write, stop_after: int | None) -> Iterator[None]:
        """Hand the output of each chosen layer, and of the final norm when it is the stop, to `write`."""
        modules = [self._layers[layer] for layer in self.layer_ids]
        if stop_after == len(modules):
            modules.append(find_final_norm(self._decoder))
        handles = [
            module.register_forward_hook(_hook(index, write, stop=index == stop_after))
            for index, module in enumerate(modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_ids(self, ids_S: Tensor) -> None:
        """Refuse foreign ids here: on a GPU an index out of range would poison the whole process."""
        if ids_S.numel() and not 0 <= int(ids_S.min()) <= int(ids_S.max()) < self.embedding_VH.shape[0]:
            raise ModelError(
                f"ids from {int(ids_S.min())} to {int(ids_S.max())} don't fit a vocabulary of "
                f"{self.embedding_VH.shape[0]}: the row was tokenized for another target"
            )


def similar_lengths(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group spans, longest first, as long as padding stays within `MAX_PADDING` of a group's tokens."""
    groups: list[list[tuple[int, int]]] = []
    tokens = 0
    for start, end in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        longest = groups[-1][0][1] - groups[-1][0][0] if groups else 0
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if groups and padded * (1 - MAX_PADDING) <= tokens + end - start:
            groups[-1].append((start, end))
            tokens += end - start
        else:
            groups.append([(start, end)])
            tokens = end - start
    return groups


def _spans(ids_S: Tensor, position_S: Tensor | None, document_S: Tensor | None) -> list[tuple[int, int]]:
    """Start and end of each document of a packed row."""
    if document_S is None:
        document_S = torch.zeros_like(ids_S) if position_S is None else (position_S == 0).cumsum(0)
    for name, values in (("positions", position_S), ("documents", document_S)):
        if values is not None and values.shape != ids_S.shape:
            raise ModelError(f"expected {name} of shape {tuple(ids_S.shape)} as the ids, found {tuple(values.shape)}")
    documents, counts = torch.unique_consecutive(document_S, return_counts=True)
    ends = counts.cumsum(0)
    spans = [
        (end - count, end)
        for document, count, end in zip(documents.tolist(), counts.tolist(), ends.tolist(), strict=True)
        if document >= 0
    ]
    expected_S = torch.arange(ids_S.numel(), device=document_S.device) - (ends - counts).repeat_interleave(counts)
    if position_S is not None and bool(((position_S != expected_S) & (document_S >= 0)).any()):
        raise ModelError("positions must count from 0 inside each document, whose tokens must be contiguous")
    return spans


def _hook(index: int, write: Write, *, stop: bool) -> Hook:
    def take(_module: nn.Module, _inputs: Any, output: Any) -> None:
        write(index, output[0] if isinstance(output, tuple) else output)
        if stop:
            raise _LastLayerReached

    return take
