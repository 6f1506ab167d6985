"""The layer protocol, version 3: calls, replies, control messages, and the catalog of sites.

Over ZeroMQ every message has two frames. A call is ``[64-byte header][rows, little-endian]``, its reply the same (a
refusal has an empty second frame). A control message is ``[b"HLM1"][encoded message]``. The truth is the executor's own
definition (``shmproto/src/layer.rs`` and ``layer/control.rs``); this module says the same in Python.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, Union

from .errors import CallRefused, ProtocolError
from .wire import I32, U8, U32, U64, Blob, Fixed, Items, Number, Numbers, Optional, Pair, Reader, Record, Text

__all__ = [
    "CATALOG",
    "CONTROL",
    "HEADER_BYTES",
    "LAYER_VERSION",
    "MAX_CATALOG_BYTES",
    "MAX_FETCH_BYTES",
    "MAX_ROWS",
    "CallHeader",
    "Catalog",
    "Channel",
    "ChannelReady",
    "Class",
    "Close",
    "Draining",
    "Dtype",
    "Fetch",
    "Fetched",
    "FromLayers",
    "GetStats",
    "Op",
    "Open",
    "Opened",
    "Part",
    "Path",
    "RefusalCode",
    "Refused",
    "ReplyHeader",
    "Ring",
    "SessionStats",
    "Site",
    "SkeletonFile",
    "Source",
    "Status",
    "ToLayers",
    "decode_catalog",
    "decode_from_layers",
    "decode_to_layers",
    "encode_catalog",
    "encode_from_layers",
    "encode_to_layers",
]

LAYER_VERSION = 4
HEADER_BYTES = 64
CONTROL = b"HLM1"
MAX_ROWS = 1 << 16
"""Most rows of a call that the protocol allows; a session's own limit may be lower."""
CATALOG = 0
"""The blob that is the catalog; blob ``n + 1`` is file ``n`` of it."""
MAX_FETCH_BYTES = 48 << 10
MAX_CATALOG_BYTES = 16 << 20

_ALL_PARTS = 0xFF
_CALL_MAGIC = b"HLC1"
_REPLY_MAGIC = b"HLR1"
_CALL = struct.Struct("<4s4BI2B2xQI4xQQ16x")
_REPLY = struct.Struct("<4sBB2xIIQII32x")


# --- Calls and replies ------------------------------------------------------------------------------------------------


class Op(enum.IntEnum):
    """What is done with the rows."""

    FORWARD = 0
    """``x @ W.T + bias``"""
    FORWARD_NO_BIAS = 1
    """``x @ W.T``"""
    BACKWARD = 2
    """``g @ W``; nothing was saved for it."""


class Path(enum.IntEnum):
    """With which arithmetic."""

    FAST = 0
    """As the resident engine computes: activations may be rounded to what the weights call for."""
    LINEAR = 1
    """Activations of 32 bits and the weights as stored: for training, masking, comparison."""
    RING = 2
    """Whole numbers modulo 2^48 or 2^64 and the weights' own integers: exact. Numbers are six or eight bytes, the lowest first."""


class Source(enum.IntEnum):
    """Where the rows of a call come from."""

    ROWS = 0
    """They follow."""
    DRAW = 1
    """A key and the number of the first row follow, from which the executor makes them; on the ring path alone."""


class Class(enum.IntEnum):
    """What the rows are for; the lower, the more urgent."""

    DECODE = 0
    VERIFY = 1
    PREFILL = 2
    TRAINING = 3
    NOISE = 4


class Dtype(enum.IntEnum):
    """How numbers travel."""

    F32 = 0
    BF16 = 1

    @property
    def bytes(self) -> int:
        """Bytes of a number."""
        return 4 if self is Dtype.F32 else 2


class Status(enum.IntEnum):
    """What became of a call."""

    DONE = 0
    QUOTA = 1
    SHAPE = 2
    BUSY = 3
    DRAINING = 4
    NONLINEAR = 5
    UNKNOWN_SITE = 6
    SEQUENCE = 7
    FAILED = 8
    UNSUITED = 9


Code = TypeVar("Code", bound=enum.IntEnum)


def _named(kind: type[Code], code: int) -> Code:
    try:
        return kind(code)
    except ValueError:
        raise ProtocolError(f"{kind.__name__} has no value {code}: the peer speaks another protocol or version") from None


def _check_header(data: bytes, magic: bytes, zero: tuple[slice, ...]) -> None:
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    if data[:4] != magic:
        raise ProtocolError(f"the header begins with {data[:4]!r}: the peer speaks another protocol or version")
    if any(any(data[part]) for part in zero):
        raise ProtocolError("reserved bytes of the header are not zero: the peer speaks a later version")


@dataclass(frozen=True)
class CallHeader:
    """These rows, through this site.

    ::

         0 magic u32 | 4 op u8 | 5 path u8 | 6 class u8 | 7 dtype u8 | 8 site u32 | 12 part u8, 0xff: all | 13 source u8 | 14 zero [2]
        16 sequence u64 | 24 rows u32 | 28 zero u32 | 32 input u64 | 40 output u64 | 48 zero [16]

    `input` and `output` are places in shared memory and 0 over ZeroMQ.
    """

    op: Op
    path: Path
    urgency: Class
    dtype: Dtype
    site: int
    part: int | None
    sequence: int
    rows: int
    input: int = 0
    output: int = 0
    source: Source = Source.ROWS

    def to_bytes(self) -> bytes:
        """As it travels."""
        part = _ALL_PARTS if self.part is None else self.part
        codes = (self.op, self.path, self.urgency, self.dtype)
        places = (self.input, self.output)
        try:
            return _CALL.pack(_CALL_MAGIC, *codes, self.site, part, self.source, self.sequence, self.rows, *places)
        except struct.error as error:
            raise ProtocolError(f"the call does not fit its header: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> CallHeader:
        """Reads one that a peer sent."""
        _check_header(data, _CALL_MAGIC, (slice(14, 16), slice(28, 32), slice(48, HEADER_BYTES)))
        _, op, path, urgency, dtype, site, part, source, sequence, rows, places, target = _CALL.unpack(data)
        if not 0 < rows <= MAX_ROWS:
            raise ProtocolError(f"a call has 1 to {MAX_ROWS} rows, not {rows}")
        return cls(
            op=_named(Op, op),
            path=_named(Path, path),
            urgency=_named(Class, urgency),
            dtype=_named(Dtype, dtype),
            site=site,
            part=None if part == _ALL_PARTS else part,
            sequence=sequence,
            rows=rows,
            input=places,
            output=target,
            source=_named(Source, source),
        )


@dataclass(frozen=True)
class ReplyHeader:
    """The answer to a call.

    ::

         0 magic u32 | 4 status u8 | 5 dtype u8 | 6 zero u16 | 8 retry_after_ms u32 | 12 rows u32 | 16 sequence u64
        24 waited_us u32 | 28 batch_rows u32 | 32 zero [32]
    """

    status: Status
    dtype: Dtype
    retry_after_ms: int
    rows: int
    sequence: int
    waited_us: int = 0
    batch_rows: int = 0

    def to_bytes(self) -> bytes:
        """As it travels."""
        numbers = (self.retry_after_ms, self.rows, self.sequence, self.waited_us, self.batch_rows)
        return _REPLY.pack(_REPLY_MAGIC, self.status, self.dtype, *numbers)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplyHeader:
        """Reads one that a peer sent."""
        _check_header(data, _REPLY_MAGIC, (slice(6, 8), slice(32, HEADER_BYTES)))
        _, status, dtype, *numbers = _REPLY.unpack(data)
        return cls(_named(Status, status), _named(Dtype, dtype), *numbers)


# --- Control messages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """First message of a connection: who wants a session."""

    version: U32
    layout_hash: U64
    key: Text = field(repr=False)
    name: Text
    masking: Text
    session: U64


@dataclass(frozen=True)
class Fetch:
    """Part of a blob is wanted, at most `MAX_FETCH_BYTES`."""

    blob: U32
    offset: U64
    bytes: U32


@dataclass(frozen=True)
class Channel:
    """Shared memory is wanted; only local sessions of other clients use it."""

    slab_bytes: U64


@dataclass(frozen=True)
class GetStats:
    """What has the session used?"""


@dataclass(frozen=True)
class Close:
    """The session ends; not answered."""


@dataclass(frozen=True)
class Opened:
    """A session. `instance` is chosen when the executor starts: another one knows nothing of this session."""

    session: U64
    instance: U64
    tenant: Text
    catalog_bytes: U32
    max_rows: U32
    max_waiting_rows: U32
    max_bytes: U64


class RefusalCode(enum.IntEnum):
    """What kind of refusal."""

    VERSION = 0
    UNAUTHENTICATED = 1
    QUOTA = 2
    BUSY = 3
    DRAINING = 4
    MALFORMED = 5
    NO_SUCH_BLOB = 6
    MASKING = 7
    NO_SUCH_SESSION = 8


class _Code:
    min_bytes = 1
    _byte = Number(1)

    def put(self, value: RefusalCode, out: bytearray) -> None:
        self._byte.put(value, out)

    def get(self, reader: Reader) -> RefusalCode:
        return _named(RefusalCode, self._byte.get(reader))


@dataclass(frozen=True)
class Refused:
    """Why not, in words a person can act on."""

    code: Annotated[RefusalCode, _Code()]
    message: Text
    retry_after_ms: U32


@dataclass(frozen=True)
class Fetched:
    """Part of a blob."""

    blob: U32
    offset: U64
    bytes: Blob


@dataclass(frozen=True)
class ChannelReady:
    """A channel was made; never sent over ZeroMQ."""

    region_bytes: U64
    slab_bytes: U64
    depth: U32


@dataclass(frozen=True)
class SessionStats:
    """What a session has used; `rows` by `Class`."""

    calls: U64
    refused: U64
    rows: Annotated[tuple[int, ...], Numbers(5)]
    bytes_in: U64
    bytes_out: U64
    wait_us: U64
    compute_us: U64
    batch_rows: U64


@dataclass(frozen=True)
class Draining:
    """The executor is about to end: no new calls are taken."""


ToLayers = Union[Open, Fetch, Channel, GetStats, Close]
FromLayers = Union[Opened, Refused, Fetched, ChannelReady, SessionStats, Draining]

_TO_LAYERS: Mapping[int, type[Any]] = {0: Open, 1: Fetch, 2: Channel, 3: GetStats, 4: Close}
_FROM_LAYERS: Mapping[int, type[Any]] = {
    0: Opened,
    1: Refused,
    2: Fetched,
    3: ChannelReady,
    4: SessionStats,
    5: Draining,
}


def _encode(variants: Mapping[int, type[Any]], message: Any) -> bytes:
    tag = next(tag for tag, kind in variants.items() if kind is type(message))
    out = bytearray([tag])
    Record(type(message)).put(message, out)
    return bytes(out)


def _decode(variants: Mapping[int, type[Any]], what: str, data: bytes) -> Any:
    reader = Reader(data)
    tag = reader.take(1)[0]
    if tag not in variants:
        raise ProtocolError(f"{what} has no variant {tag}: the peer speaks another protocol or version")
    message = Record(variants[tag]).get(reader)
    reader.finish()
    return message


def encode_to_layers(message: ToLayers) -> bytes:
    """A client's control message as it travels."""
    return _encode(_TO_LAYERS, message)


def decode_to_layers(data: bytes) -> ToLayers:
    """Reads a client's control message."""
    message: ToLayers = _decode(_TO_LAYERS, "ToLayers", data)
    return message


def encode_from_layers(message: FromLayers) -> bytes:
    """An executor's control message as it travels."""
    return _encode(_FROM_LAYERS, message)


def decode_from_layers(data: bytes) -> FromLayers:
    """Reads an executor's control message."""
    message: FromLayers = _decode(_FROM_LAYERS, "FromLayers", data)
    return message


# --- The catalog ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A linear layer of a site: module name, output features, whether it adds a bias."""

    name: Text
    rows: U32
    has_bias: U8


@dataclass(frozen=True)
class Ring:
    """The integers that a site's weights consist of: their exponent, what bounds answers forward and backward, and their hash."""

    weight_exponent: I32
    l1: Annotated[tuple[int, ...], Numbers(2)]
    commitment: Annotated[bytes, Fixed(32)]


@dataclass(frozen=True)
class Site:
    """Linear layers that share their input of `columns` features; their outputs lie side by side."""

    columns: U32
    paths: U8
    parts: Annotated[tuple[Part, ...], Items(Record(Part))]
    ring: Annotated[Ring | None, Optional(Record(Ring))] = None

    @property
    def has_fast(self) -> bool:
        """Whether `Path.FAST` is served."""
        return bool(self.paths & 1)

    @property
    def has_linear(self) -> bool:
        """Whether `Path.LINEAR` is served."""
        return bool(self.paths & 2)

    @property
    def has_ring(self) -> bool:
        """Whether `Path.RING` is served."""
        return bool(self.paths & 8)

    def has_path(self, path: Path) -> bool:
        """Whether `path` is served."""
        return {Path.FAST: self.has_fast, Path.LINEAR: self.has_linear, Path.RING: self.has_ring}[path]

    def outputs(self, part: int | None) -> int:
        """Output features of one part, or of all side by side."""
        return sum(p.rows for p in self.parts) if part is None else self.parts[part].rows

    def outputs_before(self, part: int) -> int:
        """Output features of the parts that lie before one."""
        return sum(p.rows for p in self.parts[:part])

    def widths(self, part: int | None, op: Op) -> tuple[int, int]:
        """Numbers of a row that goes in and of one that comes out."""
        outputs = self.outputs(part)
        return (outputs, self.columns) if op is Op.BACKWARD else (self.columns, outputs)


@dataclass(frozen=True)
class SkeletonFile:
    """A model file of which only some ranges are given out; elsewhere a client's copy has holes."""

    name: Text
    bytes: U64
    ranges: Annotated[tuple[tuple[int, int], ...], Items(Pair(Number(8), Number(8)))]


@dataclass(frozen=True)
class Catalog:
    """What a client must know of the base.

    `kv_dtype` (0: 32 bits, 1: 16, 2: 8, 3: bf16) and `adapter_dtype` (0: exact, 1: f16, 2: bf16) are those of the
    executor's own engine. A client with the same types gets the same bits.
    """

    model: Text
    architecture: Text
    base_hash: Annotated[bytes, Fixed(32)]
    context_length: U32
    kv_dtype: U8
    adapter_dtype: U8
    sites: Annotated[tuple[Site, ...], Items(Record(Site))]
    files: Annotated[tuple[SkeletonFile, ...], Items(Record(SkeletonFile))]

    def site(self, number: int, part: int | None = None) -> Site:
        """Site `number`, which has `part`; raises `CallRefused` if there is none."""
        if not 0 <= number < len(self.sites):
            raise CallRefused(f"{self.model} has no site {number}; it has sites 0 to {len(self.sites) - 1}")
        site = self.sites[number]
        if part is not None and not 0 <= part < len(site.parts):
            raise CallRefused(f"site {number} has no part {part}; it has parts 0 to {len(site.parts) - 1}")
        return site


def encode_catalog(catalog: Catalog) -> bytes:
    """A catalog as it travels."""
    out = bytearray()
    Record(Catalog).put(catalog, out)
    return bytes(out)


def decode_catalog(data: bytes) -> Catalog:
    """Reads a catalog that an executor sent."""
    reader = Reader(data)
    catalog: Catalog = Record(Catalog).get(reader)
    reader.finish()
    return catalog
