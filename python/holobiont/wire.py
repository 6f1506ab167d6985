"""Fixed-order little-endian encoding: a value is its fields one after the other.

Records are dataclasses whose annotations say how each field travels, so the declaration *is* the layout::

    @dataclass(frozen=True)
    class Fetch:
        blob: U32
        offset: U64
        bytes: U32

Strings and sequences carry a ``u32`` count first, which is checked against the bytes that are left before anything is
made of it. There is no self-describing envelope, and therefore no need for a serialization package.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

from .errors import ProtocolError

__all__ = ["I32", "U8", "U32", "U64", "Blob", "Codec", "Fixed", "Items", "Numbers", "Optional", "Pair", "Reader", "Record", "Text"]

T = TypeVar("T")


class Reader:
    """The unread rest of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.left:
            raise ProtocolError(f"message ends early: {count} more bytes were expected, {self.left} are left")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def finish(self) -> None:
        """Succeeds if every byte was read."""
        if self.left:
            raise ProtocolError(f"{self.left} bytes follow the end of the message")


class Codec(Protocol):
    """How values of one type travel. `min_bytes` is the fewest bytes a value takes: it bounds counts."""

    @property
    def min_bytes(self) -> int: ...

    def put(self, value: Any, out: bytearray) -> None: ...

    def get(self, reader: Reader) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Number:
    """An unsigned number of `min_bytes` bytes."""

    min_bytes: int

    def put(self, value: int, out: bytearray) -> None:
        try:
            out += value.to_bytes(self.min_bytes, "little")
        except OverflowError:
            raise ProtocolError(f"{value} does not fit in {8 * self.min_bytes} bits without a sign") from None

    def get(self, reader: Reader) -> int:
        return int.from_bytes(reader.take(self.min_bytes), "little")


_u8, _u32, _u64 = Number(1), Number(4), Number(8)


class _Text:
    min_bytes = 4

    def put(self, value: str, out: bytearray) -> None:
        _blob.put(value.encode(), out)

    def get(self, reader: Reader) -> str:
        try:
            return _blob.get(reader).decode()
        except UnicodeDecodeError:
            raise ProtocolError("a string is not UTF-8") from None


class _Blob:
    min_bytes = 4

    def put(self, value: bytes, out: bytearray) -> None:
        _u32.put(len(value), out)
        out += value

    def get(self, reader: Reader) -> bytes:
        return reader.take(_u32.get(reader))


_blob = _Blob()


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Exactly `min_bytes` bytes, without a count."""

    min_bytes: int

    def put(self, value: bytes, out: bytearray) -> None:
        if len(value) != self.min_bytes:
            raise ProtocolError(f"{self.min_bytes} bytes are called for, not {len(value)}")
        out += value

    def get(self, reader: Reader) -> bytes:
        return reader.take(self.min_bytes)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Exactly `count` numbers of 64 bits, without a count."""

    count: int

    @property
    def min_bytes(self) -> int:
        return 8 * self.count

    def put(self, value: tuple[int, ...], out: bytearray) -> None:
        if len(value) != self.count:
            raise ProtocolError(f"{self.count} numbers are called for, not {len(value)}")
        for number in value:
            _u64.put(number, out)

    def get(self, reader: Reader) -> tuple[int, ...]:
        return struct.unpack(f"<{self.count}Q", reader.take(self.min_bytes))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two values, one after the other."""

    first: Codec
    second: Codec

    @property
    def min_bytes(self) -> int:
        return self.first.min_bytes + self.second.min_bytes

    def put(self, value: tuple[Any, Any], out: bytearray) -> None:
        self.first.put(value[0], out)
        self.second.put(value[1], out)

    def get(self, reader: Reader) -> tuple[Any, Any]:
        return self.first.get(reader), self.second.get(reader)


@dataclasses.dataclass(frozen=True)
class Items:
    """A count and as many values."""

    item: Codec
    min_bytes: int = 4

    def put(self, value: tuple[Any, ...], out: bytearray) -> None:
        _u32.put(len(value), out)
        for item in value:
            self.item.put(item, out)

    def get(self, reader: Reader) -> tuple[Any, ...]:
        count: int = _u32.get(reader)
        wanted = count * max(self.item.min_bytes, 1)
        if wanted > reader.left:
            raise ProtocolError(f"message ends early: {wanted} more bytes were expected, {reader.left} are left")
        return tuple(self.item.get(reader) for _ in range(count))


@dataclasses.dataclass(frozen=True)
class Optional:
    """A value, or none: a byte 1 and the value, or a byte 0."""

    item: Codec
    min_bytes: int = 1

    def put(self, value: Any, out: bytearray) -> None:
        out.append(value is not None)
        if value is not None:
            self.item.put(value, out)

    def get(self, reader: Reader) -> Any:
        tag = _u8.get(reader)
        if tag > 1:
            raise ProtocolError(f"Option has no variant {tag}: the peer speaks another protocol or version")
        return self.item.get(reader) if tag else None


@dataclasses.dataclass(frozen=True)
class _Signed:
    """A number of 32 bits with a sign."""

    min_bytes: int = 4

    def put(self, value: int, out: bytearray) -> None:
        try:
            out += value.to_bytes(4, "little", signed=True)
        except OverflowError:
            raise ProtocolError(f"{value} does not fit in 32 bits") from None

    def get(self, reader: Reader) -> int:
        return int.from_bytes(reader.take(4), "little", signed=True)


I32 = Annotated[int, _Signed()]
U8 = Annotated[int, _u8]
U32 = Annotated[int, _u32]
U64 = Annotated[int, _u64]
Text = Annotated[str, _Text()]
Blob = Annotated[bytes, _blob]


@dataclasses.dataclass(frozen=True)
class Record:
    """A dataclass as its fields in order."""

    kind: type[Any]

    @property
    def min_bytes(self) -> int:
        return sum(codec.min_bytes for _, codec in _fields(self.kind))

    def put(self, value: Any, out: bytearray) -> None:
        for name, codec in _fields(self.kind):
            codec.put(getattr(value, name), out)

    def get(self, reader: Reader) -> Any:
        return self.kind(**{name: codec.get(reader) for name, codec in _fields(self.kind)})


_FIELDS: dict[type[Any], tuple[tuple[str, Codec], ...]] = {}


def _fields(kind: type[Any]) -> tuple[tuple[str, Codec], ...]:
    """Names and codecs of a dataclass's fields, as its annotations say; read once."""
    if kind not in _FIELDS:
        hints = get_type_hints(kind, include_extras=True)
        _FIELDS[kind] = tuple((f.name, _codec(kind, f.name, hints[f.name])) for f in dataclasses.fields(kind))
    return _FIELDS[kind]


def _codec(kind: type[Any], name: str, hint: Any) -> Codec:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{kind.__name__}.{name} does not say how it travels")
    codec: Codec = get_args(hint)[1]
    return codec
