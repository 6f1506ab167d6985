"""What a GGUF file says before its tensors: metadata, and where each tensor lies.

The ``gguf`` package reads this too, into two arrays for each token of the vocabulary: 160 MB and 3 s for 49,152 of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, BinaryIO

from .errors import ProtocolError
from .protocol import SkeletonFile

__all__ = ["Header", "Stored", "read_header"]

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True)
class Stored:
    """A tensor of `shape`, rows first, whose type is number `kind`; `offset` counts from the file's begin."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """All but the tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_header(path: FilePath, file: SkeletonFile) -> Header:
    """Reads it, and nothing that was not given out; raises `ProtocolError` if it is none."""
    end = next((length for start, length in file.ranges if start == 0), 0)
    with open(path, "rb") as stored:
        try:
            return _header(_Reader(stored, end))
        except (struct.error, ValueError, KeyError) as error:
            raise ProtocolError(f"{file.name} is no GGUF file that can be read: {error}") from error


def _header(reader: _Reader) -> Header:
    magic, version = reader.bytes(4), reader.number("I")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    tensors, entries = reader.number("Q"), reader.number("Q")
    metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(entries)}
    stored = {reader.text(): reader.stored() for _ in range(tensors)}
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    begin = -(-reader.at // alignment) * alignment
    return Header(metadata, {name: Stored(it.shape, it.kind, begin + it.offset) for name, it in stored.items()})


class _Reader:
    """The unread rest of a file's first `end` bytes."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file = file
        self._end = end

    @property
    def at(self) -> int:
        return self._file.tell()

    def bytes(self, count: int) -> bytes:
        if self.at + count > self._end:
            raise ValueError("it ends early")
        return self._file.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            of, count = self.number("I"), self.number("Q")
            return [self.text() if of == _TEXT else self.number(_NUMBERS[of]) for _ in range(count)]
        return self.number(_NUMBERS[kind])

    def stored(self) -> Stored:
        """A tensor, its offset counted from the first one's; dimensions are stored the other way round."""
        shape = tuple(reversed([self.number("Q") for _ in range(self.number("I"))]))
        return Stored(shape, self.number("I"), self.number("Q"))
