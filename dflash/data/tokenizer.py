"""Load the target's tokenizer and check that it gives the target's ids. Never imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from dflash.data.chat import FIXED_CLOCK, ChatTemplate
from dflash.data.control_tokens import ControlTokens
from dflash.data.encoder_probes import TEXT_PROBES
from dflash.data.encoders import EncoderChoice, choose_encoder, confirm_encoder, rust_panics_as_errors
from dflash.data.token_bytes import TokenBytes
from dflash.data.turn_program import TurnPrograms
from dflash.errors import TokenizerError
from dflash.manifest import TokenizerRecord

TOKENIZER_FILE = "tokenizer.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is kept of a tokenizer.json.

    Attributes:
        canonical: hash of its canonical form.
        plain: digest of it without formatting.
        ids: of the vocabulary and the added tokens; None where the vocabulary isn't a map of tokens to ids.
        joined: the file with each merge as one text, without truncation and padding, for the fast encoder.
    """

    canonical: hashlib._Hash
    plain: bytes
    ids: frozenset[int] | None
    joined: bytes


@dataclass(frozen=True)
class TargetTokenizer:
    """The target's tokenizer: ids, template, fingerprints.

    Attributes:
        name: the folder or hub id it was loaded from.
        backend: encodes; its truncation and padding are off.
        template: renders conversations.
        special_tokens: names such as `eos_token` and their texts.
        definition: the tokenizer.json, where it was loaded from one.
    """

    name: str
    backend: Tokenizer
    template: ChatTemplate
    special_tokens: Mapping[str, str]
    definition: Path | None = None
    _choices: list[EncoderChoice] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def controls(self) -> ControlTokens:
        """Added tokens marked special, and the end-of-sequence token."""
        ids = {token.content: number for number, token in self._added.items() if token.special}
        eos = self.special_tokens.get("eos_token")
        eos_id = self.backend.token_to_id(eos) if eos else None
        return ControlTokens(ids if eos is None or eos_id is None else {**ids, eos: eos_id})

    @cached_property
    def turn_programs(self) -> TurnPrograms:
        """What splits turns of shapes that have come before."""
        return TurnPrograms()

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self.backend.token_to_id(eos)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(self.controls.ids.values())

    @cached_property
    def known_ids(self) -> range | frozenset[int]:
        """Ids that are a token's; a vocabulary may have gaps."""
        ids = self._rules.ids if self.is_its_definition else None  # at hand, while the backend would list them anew
        if ids is None:
            ids = frozenset(self.backend.get_vocab(with_added_tokens=True).values())
        largest = max(ids, default=-1)
        return range(largest + 1) if len(ids) == largest + 1 else ids

    @cached_property
    def vocab_size(self) -> int:
        """Largest id plus one; the embedding may have more rows."""
        return max(self.known_ids, default=-1) + 1

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """Ids of a newline, where the tokenizer puts a space in front of a text (SentencePiece style), else none.

        There, a text that continues another is encoded behind a newline, whose ids are then dropped.
        """
        newline, letter, both = (self.backend.encode(text, add_special_tokens=False).ids for text in ("\n", "a", "\na"))
        return () if both == newline + letter else tuple(newline)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of each token."""
        return TokenBytes(self.backend)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over what decides the ids: the canonical tokenizer.json, added and special tokens."""
        added = [
            (number, token.content, token.special, token.normalized, token.lstrip, token.rstrip, token.single_word)
            for number, token in sorted(self._added.items())
        ]
        digest = self._rules.canonical.copy()
        digest.update(msgspec.json.encode([added, sorted(self.special_tokens.items())]))
        return digest.hexdigest()

    @cached_property
    def is_its_definition(self) -> bool:
        """Whether the backend, written down, is its tokenizer.json to the letter; white space aside."""
        return self._rules.plain == hashlib.sha256(self._written.encode()).digest()

    @property
    def template_fingerprint(self) -> str:
        """SHA-256 (hex) over the chat template and the special tokens it reads."""
        return self.template.fingerprint

    @cached_property
    def record(self) -> TokenizerRecord:
        """What the manifest keeps about the tokenizer."""
        return TokenizerRecord(
            name=self.name,
            fingerprint=self.fingerprint,
            template_fingerprint=self.template_fingerprint,
            vocab_size=self.vocab_size,
        )

    def prepare_encoder(self) -> None:
        """Choose the encoder for bulk work before there is a sample of it; `encoder_for` completes the proof."""
        if not self._choices:
            definition = self._rules.joined.decode() if self.is_its_definition else self._written
            self._choices.append(choose_encoder(self.backend, definition))

    def encoder_for(self, sample: Sequence[str]) -> EncoderChoice:
        """The encoder for bulk work: chosen once, with the first `sample` among the texts of the proof."""
        self.prepare_encoder()
        if len(self._choices) == 1:
            self._choices.append(confirm_encoder(self._choices[0], self.backend, sample))
        return self._choices[1]

    @cached_property
    def _written(self) -> str:
        return self.backend.to_str()

    @cached_property
    def _rules(self) -> _Rules:
        """Read once, since decoding and encoding the whole vocabulary takes most of a second."""
        rules = msgspec.json.decode(self._written if self.definition is None else self.definition.read_bytes())
        # In this order: each step leaves the rules as the next one needs them.
        plain = hashlib.sha256(msgspec.json.encode(rules)).digest()
        canonical = hashlib.sha256(_canonical_json(rules))
        return _Rules(canonical, plain, _ids(rules), _with_joined_merges(rules))

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self.backend.get_added_tokens_decoder())


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False, probe: bool = True) -> TargetTokenizer:
    """Load a tokenizer from a folder or, by id, from the Hugging Face hub or its cache.

    Args:
        name_or_path: folder or id.
        trust_remote_code: passed to transformers; a fast tokenizer needs no code of its own.
        probe: whether to prove that the tokenizer gives the ids of its tokenizer.json, where it isn't that file to the
            letter, and to warn of a template that reads the clock. False only where the process that started this one
            has loaded the same files with the proof.

    Raises:
        TokenizerError: it isn't there, isn't a fast tokenizer, has no chat template, or (with `probe`) gives other ids
            than its own tokenizer.json.
    """
    name = str(name_or_path)
    definition = _find_definition(name)
    try:
        with rust_panics_as_errors("tokenizers"):
            loaded = PreTrainedTokenizerFast.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers package raises plain Exception for a damaged file
        raise TokenizerError(
            f"The tokenizer {name} can't be loaded: {type(error).__name__}: {error}. "
            f"Check {TOKENIZER_FILE} and tokenizer_config.json there."
        ) from error
    target = adapt_tokenizer(loaded, definition=definition)
    if probe:
        if not target.is_its_definition:
            _require_same_ids(name, definition, target.backend)
        if target.template.reads_clock:
            log.warning(
                "the chat template of %s may put today's date into prompts: here the clock stands at %s. Give the date "
                "of sampling in chat_template_kwargs, or prompt_token_ids, where the server rendered another",
                name,
                f"{FIXED_CLOCK:%Y-%m-%d}",
            )
    return target


def adapt_tokenizer(tokenizer: PreTrainedTokenizerBase, *, definition: Path | None = None) -> TargetTokenizer:
    """Use a tokenizer that transformers has loaded; its truncation and padding are switched off.

    Raises:
        TokenizerError: it isn't a fast tokenizer or has no chat template.
    """
    name = str(tokenizer.name_or_path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"The tokenizer {name or type(tokenizer).__name__} isn't a fast one: expected one with a {TOKENIZER_FILE}, "
            f"found {type(tokenizer).__name__}. Convert it with transformers and save it."
        )
    _cover_whole_texts(backend)
    special = {key: str(text) for key, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TargetTokenizer(name, backend, _template(name, tokenizer.chat_template, special), special, definition)


def _cover_whole_texts(backend: Tokenizer) -> None:
    """Switch off truncation and padding, where they are on: another thread may be encoding with the same backend."""
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()


def _template(name: str, chat_template: Any, special: Mapping[str, str]) -> ChatTemplate:
    named = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
    source = named.get("default")
    if not isinstance(source, str) or not source.strip():
        raise TokenizerError(
            f"The tokenizer {name} has no chat template: expected chat_template.jinja or a chat_template in "
            f"tokenizer_config.json, found {sorted(named) if isinstance(chat_template, dict) else 'none'}. "
            f"Copy the template of the server that sampled the completions."
        )
    return ChatTemplate(source, special, named.get("tool_use"))


def _find_definition(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        found = folder / TOKENIZER_FILE
        if found.is_file():
            return found
        raise TokenizerError(
            f"No {TOKENIZER_FILE} in {folder}: expected the folder of a fast tokenizer, found "
            f"{', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}."
        )
    if folder.exists() or folder.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise TokenizerError(f"No tokenizer folder {name}: expected a folder with {TOKENIZER_FILE}, or a hub id.")
    try:
        return Path(cached_file(name, TOKENIZER_FILE))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"The tokenizer {name} is neither a folder nor a hub id with a {TOKENIZER_FILE} that can be had "
            f"here: {error}"
        ) from error


def _require_same_ids(name: str, definition: Path, loaded: Tokenizer) -> None:
    """Refuse a tokenizer that transformers rebuilt with other rules than its tokenizer.json has."""
    raw = Tokenizer.from_file(str(definition))
    _cover_whole_texts(raw)
    for text in TEXT_PROBES:
        expected = raw.encode(text, add_special_tokens=False).ids
        found = loaded.encode(text, add_special_tokens=False).ids
        if found != expected:
            raise TokenizerError(
                f"The tokenizer {name} as transformers loads it gives other ids than its {TOKENIZER_FILE}: for "
                f"{text!r} expected {expected[:12]}, found {found[:12]}. Its tokenizer_config.json names a class "
                f"with other rules; set tokenizer_class to PreTrainedTokenizerFast."
            )


def _ids(definition: dict[str, Any]) -> frozenset[int] | None:
    vocabulary = definition.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    return frozenset([*vocabulary.values(), *(token["id"] for token in definition.get("added_tokens", ()))])


def _canonical_json(definition: dict[str, Any]) -> bytes:
    """tokenizer.json with sorted keys, without formatting, and without what doesn't decide the ids here."""
    definition.pop("truncation", None)
    definition.pop("padding", None)
    merges = definition.get("model", {}).get("merges")
    if merges and isinstance(merges[0], str):  # older files join each pair with a space
        definition["model"]["merges"] = [merge.split(" ") for merge in merges]
    return msgspec.json.encode(definition, order="sorted")


def _with_joined_merges(definition: dict[str, Any]) -> bytes:
    """tokenizer.json as older files are: the parts of each merge joined with a space, unless one of them holds one.

    The fast encoder reads it in four fifths of the time. Changes its argument, as `_canonical_json` does.
    """
    merges = definition.get("model", {}).get("merges")
    if merges:
        with contextlib.suppress(TypeError):  # no lists of texts, in a model that has no merges: they stay
            joined = list(map(" ".join, merges))
            if all(merge.count(" ") == 1 for merge in joined):
                definition["model"]["merges"] = joined
    return msgspec.json.encode(definition)
