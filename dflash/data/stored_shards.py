"""Shards that a dataset's store holds already: which of them are whole, and how a damaged one is replaced.

Shards, indexes and rejects are named by their content, so other content under such a name is damage and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, overload

import pyarrow as pa

from dflash.data.dataset import DatasetRoot
from dflash.data.plan import ShardPlan
from dflash.data.shards import read_index
from dflash.data.spool import INDEX_FILE, REJECTS_FILE, SHARD_FILE, remove_spooled
from dflash.data.without_pandas import to_numpy
from dflash.errors import DatasetError, IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.manifest import InputFile, ShardEntry, ShardReceipt, sha256_hex
from dflash.storage import Store
from dflash.storage.files import file_sha256

READS_AT_ONCE: Final = 4


def whole_receipts(root: DatasetRoot, fingerprints: Iterable[str]) -> dict[str, ShardReceipt]:
    """Receipts of those fingerprints whose shard, index and rejects the store holds undamaged, by fingerprint.

    Shards that the current version doesn't name are read through: publishing them must not rest on what another run
    said it has uploaded. Those that it names are compared by size; `dflash verify` reads them.
    """
    found = root.receipts(fingerprints)
    if not found:
        return {}
    current = root.current()
    published = frozenset[str]() if current is None else frozenset(entry.sha256 for entry in current.shards)
    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        whole = threads.map(lambda receipt: _is_whole(root, receipt, published), found.values())
        return {fingerprint: found[fingerprint] for fingerprint, is_whole in zip(found, whole, strict=True) if is_whole}


def _is_whole(root: DatasetRoot, receipt: ShardReceipt, published: frozenset[str]) -> bool:
    entry = receipt.shard
    try:
        if entry.num_rows and entry.sha256 not in published:
            root.store.verify(entry.key, sha256=entry.sha256)
        root.meta.verify(entry.index_key, sha256=entry.index_sha256)
        is_described = _describes(read_index(root.fetch_index(entry)), entry)
        return is_described and _reasons(root, receipt) == receipt.reject_reasons
    except (IntegrityError, ObjectNotFoundError, DatasetError):
        return False


def _describes(index: pa.Table, entry: ShardEntry) -> bool:
    counts = [int(to_numpy(index[name]).sum()) for name in ("num_tokens", "num_loss_tokens")]
    return [index.num_rows, *counts] == [entry.num_rows, entry.num_tokens, entry.num_loss_tokens]


def _reasons(root: DatasetRoot, receipt: ShardReceipt) -> dict[str, int]:
    if receipt.rejects_sha256 is None:
        return {}
    content = root.meta.read(f"rejects/{receipt.rejects_sha256}.jsonl", sha256=receipt.rejects_sha256)
    return Counter(json.loads(line)["reason"] for line in content.splitlines())


def is_of(receipt: ShardReceipt, plan: ShardPlan) -> bool:
    """Whether what a receipt says of its input is what was planned, and adds up; a damaged one may still be read."""
    planned = [(item.info.key, item.info.size, item.info.etag, item.identity) for item in plan.files]
    read = [(item.key, item.size, item.etag, _identity(item, plan)) for item in receipt.inputs]
    num_rejected = sum(receipt.reject_reasons.values())
    counts = (sum(item.num_rejected for item in receipt.inputs), receipt.num_records)
    return read == planned and counts == (num_rejected, num_rejected + receipt.shard.num_rows)


def _identity(item: InputFile, plan: ShardPlan) -> str:
    by_etag = plan.files[0].identity.startswith("etag:")
    return f"etag:{item.etag}" if by_etag else f"sha256:{item.sha256}"


def put_in_place(root: DatasetRoot, receipt: ShardReceipt, spool: Path) -> None:
    """Put a spooled shard with its index and rejects in place, the receipt last; then clear its spool.

    Args:
        root: the dataset.
        receipt: of the shard.
        spool: folder of finished shards; another run may put this one in place and remove it there.

    Raises:
        IntegrityError: the spooled files are not what the receipt says, or the store holds another shard for it.
        StorageError: they are gone, and the store doesn't hold the shard either.
    """
    entry, folder = receipt.shard, spool / receipt.shard.fingerprint
    if _is_in_place(root, receipt):
        remove_spooled(folder)
        return
    if not folder.is_dir():
        if _is_in_place(root, receipt):  # by another run on this machine, just now
            return
        raise StorageError(f"{folder} is gone before its upload to {root.uri}. Run again: it is made anew.")
    if entry.num_rows:
        put_content(root.store, entry.key, folder / SHARD_FILE, entry.sha256)
    put_content(root.meta, entry.index_key, folder / INDEX_FILE, entry.index_sha256)
    if receipt.rejects_sha256 is not None:
        key = f"rejects/{receipt.rejects_sha256}.jsonl"
        put_content(root.meta, key, folder / REJECTS_FILE, receipt.rejects_sha256)
    put_receipt(root, receipt)
    remove_spooled(folder)


def _is_in_place(root: DatasetRoot, receipt: ShardReceipt) -> bool:
    stored = whole_receipts(root, [receipt.shard.fingerprint]).get(receipt.shard.fingerprint)
    return stored is not None and same_but_encoder(stored, receipt)


def put_content(store: Store, key: str, path: Path, sha256: str) -> None:
    """Store a file under the name of its content; a damaged object that lies there is replaced.

    Raises:
        IntegrityError: the file itself is damaged, and was to be sent.
    """
    try:
        # One that was there already may have been compared by its size alone.
        if store.put_if_absent(key, path, sha256=sha256) or not _is_damaged(store, key, sha256):
            return
    except IntegrityError:
        if not _is_damaged(store, key, sha256):
            raise
    _mend(store, key, path, sha256)


def _mend(store: Store, key: str, path: Path, sha256: str) -> None:
    """Replace a damaged object in one step: a kill leaves the one or the other, never none."""
    try:
        etag = store.head(key).etag
        store.replace(key, _verified_bytes(path, sha256), if_match=etag)
    except ObjectNotFoundError:
        store.put_if_absent(key, path, sha256=sha256)
    except PreconditionError:
        # Another run was quicker; it has the same content or none.
        store.verify(key, sha256=sha256)


def _verified_bytes(path: Path, sha256: str) -> bytes:
    """Read a file whose SHA-256 is known.

    Raises:
        IntegrityError: it has another content.
    """
    content = path.read_bytes()
    _require_sha256(path, sha256_hex(content), sha256)
    return content


def _require_sha256(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise IntegrityError(
            f"{path} was damaged: expected sha256 {expected}, found {found}. Run again: the shard is made anew."
        )


def _is_damaged(store: Store, key: str, sha256: str) -> bool:
    try:
        store.verify(key, sha256=sha256)
    except IntegrityError:
        return True
    except ObjectNotFoundError:
        return False
    return False


def put_receipt(root: DatasetRoot, receipt: ShardReceipt) -> None:
    """Store a receipt; one that is there may differ in the encoder's name. A damaged one is replaced.

    Raises:
        IntegrityError: another shard was made from the same input.
    """
    try:
        root.meta.put_if_absent(receipt.key, receipt.to_bytes())
    except IntegrityError:
        _replace_receipt(root, receipt)


def _replace_receipt(root: DatasetRoot, receipt: ShardReceipt) -> None:
    etag = root.meta.head(receipt.key).etag
    stored = root.receipts([receipt.shard.fingerprint]).get(receipt.shard.fingerprint)
    if stored is not None and stored.shard.sha256 != receipt.shard.sha256:
        raise IntegrityError(
            f"Two different shards were made from the same input ({root.meta.uri}/{receipt.key}):\n"
            f"  stored: {stored.shard.sha256} by {stored.shard.encoder}\n"
            f"  made:   {receipt.shard.sha256} by {receipt.shard.encoder}\n"
            "The encoders disagree, or a release changed the rows without a new code version."
        )
    if stored is None or not same_but_encoder(stored, receipt):
        root.meta.replace(receipt.key, receipt.to_bytes(), if_match=etag)


def same_but_encoder(stored: ShardReceipt, receipt: ShardReceipt) -> bool:
    """Whether two receipts differ at most in the name of the encoder, which doesn't decide the rows."""
    shard = stored.shard.model_copy(update={"encoder": receipt.shard.encoder})
    return stored.model_copy(update={"shard": shard}) == receipt


class ShardIndexes(Sequence[pa.Table]):
    """The indexes of shards, each read from its file when it is asked for.

    Args:
        entries: the shards.
        path_of: where the index of a shard lies now.
    """

    def __init__(self, entries: Sequence[ShardEntry], path_of: Callable[[ShardEntry], Path]) -> None:
        self._entries = entries
        self._path_of = path_of

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> pa.Table: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[pa.Table]: ...

    def __getitem__(self, place: int | slice) -> pa.Table | Sequence[pa.Table]:
        """Read an index.

        Raises:
            IntegrityError: it isn't what was written.
        """
        if isinstance(place, slice):
            return ShardIndexes(self._entries[place], self._path_of)
        entry = self._entries[place]
        path = self._path_of(entry)
        _require_sha256(path, file_sha256(path), entry.index_sha256)
        return read_index(path)
