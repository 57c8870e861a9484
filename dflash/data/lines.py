r"""Lines of plain, gzip and Zstandard files as a stream; memory is bounded by the longest line.

Lines end at `\n` alone: U+2028, U+0085 and `\r` are content. Decompression goes in steps of bounded output, so that
a small file can't fill the memory.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

import msgspec
import numpy as np
import zstandard

from dflash.data.records import Reason
from dflash.errors import RecordError

_READ_BYTES = 1 << 18  # per step, of the file as it lies on the disk
_OUTPUT_BYTES = 1 << 20  # per step, of the decompressed file
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_Piece = TypeVar("_Piece")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one file may ask for.

    Attributes:
        max_record_bytes: longest line; a longer one is skipped and rejected.
        max_ratio: how many times larger than itself a compressed file may become.
        min_bomb_bytes: up to here no ratio counts: small files of equal lines compress very well.
        max_decompressed_bytes: how large a compressed file may become, whatever its size.
    """

    max_record_bytes: int = 256 << 20
    max_ratio: int = 500
    min_bomb_bytes: int = 256 << 20
    max_decompressed_bytes: int = 64 << 30


class Line(msgspec.Struct, frozen=True):
    """One line, or the place where the file breaks off.

    Attributes:
        number: from 1.
        byte_offset: of its first byte in the decompressed file; with a fault of the file, where that ends.
        data: without the newline; empty with an error.
        ending: `newline`, `end` for a last line without one, `cut` where the file breaks off in this line.
        error: why there is no data; the file's faults come last.
    """

    number: int
    byte_offset: int
    data: bytes
    ending: Literal["newline", "end", "cut"]
    error: RecordError | None = None


class Block(msgspec.Struct, frozen=True):
    """Whole lines behind one another, none of them too long.

    Attributes:
        number: of the first line, from 1.
        byte_offset: of its first byte in the decompressed file.
        data: the lines, each with its newline.
    """

    number: int
    byte_offset: int
    data: bytes


def iter_lines(file: BinaryIO, name: str, limits: ReadLimits) -> Iterator[Line]:
    """Lines of an open file.

    Args:
        file: opened for bytes, at its start.
        name: tells the compression by its suffix, where the first bytes don't.
        limits: see `ReadLimits`.

    Yields:
        Each line with its position, blank ones too. Where the file breaks off, the unfinished line (if any) with the
        ending `cut`, then one with the error.
    """
    splitter = _Splitter(limits.max_record_bytes)
    yield from _iter_pieces(file, name, limits, splitter, splitter.feed)


def iter_blocks(file: BinaryIO, name: str, limits: ReadLimits) -> Iterator[Block | Line]:
    """The same lines as `iter_lines` yields, many at a time where nothing is wrong with them."""
    splitter = _Splitter(limits.max_record_bytes)
    yield from _iter_pieces(file, name, limits, splitter, splitter.feed_block)


def _iter_pieces(
    file: BinaryIO, name: str, limits: ReadLimits, splitter: _Splitter, feed: Callable[[bytes], Iterator[_Piece]]
) -> Iterator[_Piece | Line]:
    fault: RecordError | None = None
    try:
        for chunk in _chunks(file, name, limits):
            yield from feed(chunk)
    except RecordError as error:
        fault = error
    yield from splitter.finish("end" if fault is None else "cut")
    if fault is not None:
        yield Line(splitter.number, splitter.end_offset, b"", "cut", fault)


class _Splitter:
    """Cuts chunks at newlines; keeps the pieces of an unfinished line until it is too long."""

    def __init__(self, max_record_bytes: int) -> None:
        self.number = 1
        self.end_offset = 0  # of all that was fed
        self._start = 0  # offset of the unfinished line
        self._pieces: list[bytes] = []
        self._max_record_bytes = max_record_bytes

    def feed(self, chunk: bytes) -> Iterator[Line]:
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            self._append(piece)
            yield self._take("newline")
            self.end_offset += 1
            self.number += 1
            self._start = self.end_offset
        self._append(rest)

    def feed_block(self, chunk: bytes) -> Iterator[Block | Line]:
        cut = chunk.rfind(b"\n") + 1
        # No line of the block is longer than it is, so none is too long.
        if not cut or self.end_offset - self._start + cut > self._max_record_bytes:
            yield from self.feed(chunk)
            return
        block = Block(self.number, self._start, b"".join([*self._pieces, memoryview(chunk)[:cut]]))
        self._pieces.clear()
        self.end_offset = self._start = self._start + len(block.data)
        # Five times as fast as counting in the bytes themselves.
        self.number += int(np.count_nonzero(np.frombuffer(block.data, np.uint8) == ord("\n")))
        yield block
        self._append(chunk[cut:])

    def finish(self, ending: Literal["end", "cut"]) -> Iterator[Line]:
        if self.end_offset > self._start:
            yield self._take(ending)

    def _append(self, piece: bytes) -> None:
        self.end_offset += len(piece)
        if self.end_offset - self._start > self._max_record_bytes:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def _take(self, ending: Literal["newline", "end", "cut"]) -> Line:
        size = self.end_offset - self._start
        error = None if size <= self._max_record_bytes else self._too_large(size)
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return Line(self.number, self._start, data, ending, error)

    def _too_large(self, size: int) -> RecordError:
        return RecordError(
            Reason.RECORD_TOO_LARGE,
            f"expected a line of at most {self._max_record_bytes} bytes, found {size}. If it is one record, raise "
            "max_record_bytes; if not, put a newline after each record.",
        )


def _chunks(file: BinaryIO, name: str, limits: ReadLimits) -> Iterator[bytes]:
    """The decompressed file in pieces; the first bytes decide on the format, the name where they are damaged."""
    head = file.read(4)
    file.seek(0)
    if not head:
        return
    if head.startswith(_GZIP_MAGIC) or (name.endswith(".gz") and not head.startswith(_ZSTD_MAGIC)):
        steps = _gunzip(file)
    elif head == _ZSTD_MAGIC or _is_skippable(head) or name.endswith(".zst"):
        steps = _unzstd(file)
    else:
        while chunk := file.read(_READ_BYTES):
            yield chunk
        return
    size = os.fstat(file.fileno()).st_size
    allowed = min(limits.max_decompressed_bytes, max(limits.min_bomb_bytes, limits.max_ratio * size))
    total = 0
    for chunk in steps:
        total += len(chunk)
        if total > allowed:
            raise RecordError(
                Reason.FILE_TOO_LARGE,
                f"expected at most {allowed} bytes from a compressed file of {size}, found more: a decompression bomb? "
                "If the file is right, raise max_ratio or max_decompressed_bytes, or split it.",
            )
        yield chunk


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Members one after the other; zero bytes between and after them are padding."""
    decoder: zlib._Decompress | None = zlib.decompressobj(wbits=31)
    data = b""  # read, not yet decoded
    while data := data or file.read(_READ_BYTES):
        if decoder is None:
            data = data.lstrip(b"\0")
            decoder = zlib.decompressobj(wbits=31) if data else None
            continue
        if chunk := _inflate(decoder, data):
            yield chunk
        data = decoder.unconsumed_tail
        if decoder.eof:
            data, decoder = decoder.unused_data, None
    if decoder is None:
        return
    while chunk := _inflate(decoder, b""):
        yield chunk
    if not decoder.eof:
        raise _truncated("gzip member")


def _inflate(decoder: zlib._Decompress, data: bytes) -> bytes:
    try:
        return decoder.decompress(data, _OUTPUT_BYTES)
    except zlib.error as error:
        raise _corrupt("gzip", str(error)) from None


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Frames one after the other, fed block by block: the library's reader neither bounds its output nor sees a cut."""
    while magic := file.read(4):
        if _is_skippable(magic):
            _skip(file, int.from_bytes(_read_exactly(file, 4), "little"))
        elif magic == _ZSTD_MAGIC:
            yield from _unzstd_frame(file)
        elif _ZSTD_MAGIC.startswith(magic):
            raise _truncated("Zstandard frame")
        else:
            raise _corrupt("Zstandard", f"a frame starts with {magic.hex()}, not with {_ZSTD_MAGIC.hex()}")


def _unzstd_frame(file: BinaryIO) -> Iterator[bytes]:
    """One frame behind its magic number (RFC 8878, section 3.1.1)."""
    start = _ZSTD_MAGIC + _read_exactly(file, 1)
    has_checksum = bool(start[4] & 4)
    decoder = zstandard.ZstdDecompressor().decompressobj()
    try:
        decoder.decompress(start + _read_exactly(file, zstandard.frame_header_size(start) - 5))
        last = False
        while not last:
            header = _read_exactly(file, 3)
            fields = int.from_bytes(header, "little")
            last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
            yield decoder.decompress(header + _read_exactly(file, 1 if kind == 1 else size))
        if has_checksum:
            yield decoder.decompress(_read_exactly(file, 4))
    except zstandard.ZstdError as error:
        raise _corrupt("Zstandard", str(error)) from None
    if not decoder.eof:
        raise _corrupt("Zstandard", "the frame's last block doesn't end it")


def _is_skippable(magic: bytes) -> bool:
    return len(magic) == 4 and magic[0] & 0xF0 == 0x50 and magic[1:] == b"\x2a\x4d\x18"


def _skip(file: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(_read_exactly(file, min(num_bytes, _READ_BYTES)))


def _read_exactly(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise _truncated("Zstandard frame")
    return data


def _truncated(unit: str) -> RecordError:
    return RecordError(
        Reason.TRUNCATED_FILE,
        f"expected the end of a {unit}, found the end of the file: it was cut, and what lay behind this line is lost. "
        "Upload the file again.",
    )


def _corrupt(kind: str, complaint: str) -> RecordError:
    return RecordError(
        Reason.CORRUPT_STREAM,
        f"expected {kind} data, found damage: {complaint}. What lay behind this line is lost, and no checksum "
        "vouches for the lines before it. Upload the file again.",
    )
