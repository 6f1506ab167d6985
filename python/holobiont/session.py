"""A session with an executor: rows in, rows out, whatever happens to the connection in between.

A call is a pure function of its rows, so repeating one is always safe: after a lost connection it is sent again with its
own number, and the executor, which keeps nothing between calls, computes it anew if it must.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from .connection import Link
from .counters import Counters
from .distinct import Apart
from .endpoint import Credentials, LocalEndpoint, parse_endpoint
from .errors import (
    BaseChanged,
    CallRefused,
    ConnectionLost,
    HolobiontError,
    ProtocolError,
    QuotaExceeded,
    SessionRefused,
)
from .fixed_point import room_of
from .fork_safety import renewed_in_forks
from .protocol import (
    CATALOG,
    CONTROL,
    LAYER_VERSION,
    MAX_CATALOG_BYTES,
    MAX_FETCH_BYTES,
    CallHeader,
    Catalog,
    Class,
    Close,
    Draining,
    Dtype,
    Fetch,
    Fetched,
    FromLayers,
    GetStats,
    Op,
    Open,
    Opened,
    Path,
    RefusalCode,
    Refused,
    ReplyHeader,
    SessionStats,
    Source,
    Status,
    ToLayers,
    decode_catalog,
    decode_from_layers,
    encode_to_layers,
)
from .retries import Backoff, Limits, TryLater, refusal
from .wire_dtype import Rows, decode_rows, encode_rows

__all__ = ["Ask", "Session"]

T = TypeVar("T")

log = logging.getLogger("holobiont")

# Rows of one message, in bytes of the larger side: enough that headers do not matter, little enough to flow.
_MESSAGE_BYTES = 16 << 20
# How long the message that ends a session may take to leave.
_FAREWELL_S = 0.2
_REFUSED_CALLS = {
    Status.SHAPE: "the rows do not fit the site; was the model built from another configuration?",
    Status.UNSUITED: "operation, path, number format and source of rows do not go together: use one release of both",
    Status.NONLINEAR: "the site cannot serve this path without rounding; use path='linear', or masking='off'",
    Status.UNKNOWN_SITE: "there is no such site; attach again, the executor's base may have changed",
}


@dataclass(frozen=True)
class Ask:
    """What is asked of a site, or of one of its parts, besides its rows."""

    site: int
    part: int | None
    op: Op
    path: Path
    urgency: Class

    def header(self, rows: int, dtype: Dtype, source: Source = Source.ROWS) -> CallHeader:
        """That of a call of so many rows, without its number."""
        return CallHeader(self.op, self.path, self.urgency, dtype, self.site, self.part, 0, rows, source=source)


class Session:
    """Rented base layers. Thread-safe: one call at a time, under one lock (autograd runs backward in other threads).

    `endpoint` is ``tls://host:port``, or, on the executor's own host, the path of its directory or of a layer socket in it
    (``ipc://PATH`` means the same). `masking` is told to the executor and refused by it if its base cannot serve it;
    applying it is `holobiont.masking`'s business.

    A session that cannot be opened says so at once; one that was open is opened again for as long as `limits` allow. After
    a fork the child has a session of its own.
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str],
        *,
        api_key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        certificate_key: str | os.PathLike[str] | None = None,
        name: str = "holobiont-python",
        masking: str = "off",
        limits: Limits | None = None,
    ) -> None:
        self.endpoint = parse_endpoint(endpoint)
        self.masking = masking
        self._credentials = Credentials(api_key, ca, certificate, certificate_key)
        self._name = name
        self._limits = limits or Limits()
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._opened: Opened | None = None
        self._resume = 0
        self._sequence = 0
        self._closed = False
        self._catalog: Catalog | None = None
        self._counters = Counters()
        self._apart: Apart | None = None
        with self._lock:
            self._persist(self._connected)
        renewed_in_forks(self)

    # --- What a session is --------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """What the executor serves."""
        assert self._catalog is not None, "a session that is open has a catalog"
        return self._catalog

    @property
    def opened(self) -> Opened:
        """Number, tenant and limits of the session."""
        assert self._opened is not None, "a session is open once it is constructed"
        return self._opened

    @property
    def counters(self) -> Counters:
        """What this session has sent and received so far; `stats` is the executor's word on it."""
        return self._counters

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"session {self.opened.session} of tenant {self.opened.tenant!r}"
        return f"<holobiont.Session {self.endpoint}, {state}, masking {self.masking}>"

    def close(self) -> None:
        """Ends the session; a second time does nothing."""
        with self._lock:
            self._closed = True
            if self._link is None:
                return
            try:
                self._link.send([CONTROL, encode_to_layers(Close())], time.monotonic() + _FAREWELL_S)
            except HolobiontError:
                pass  # it is lost: that ends it too
            self._drop(_FAREWELL_S)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        site: int,
        rows: Rows,
        *,
        part: int | None = None,
        op: Op = Op.FORWARD,
        path: Path = Path.LINEAR,
        urgency: Class = Class.TRAINING,
        dtype: Dtype = Dtype.F32,
    ) -> Rows:
        """Takes ``[rows, inputs]`` through a site and returns ``[rows, outputs]``; cut where it is too large for one."""
        if path is Path.RING:
            raise CallRefused("rows of floats are no whole numbers; the ring path is for attach(..., path='ring')")
        self.check_rows(site, part, op, rows)
        return self.ask(Ask(site, part, op, path, urgency), rows, dtype)

    def check_rows(self, site: int, part: int | None, op: Op, rows: Rows) -> None:
        """Raises `CallRefused` where rows do not fit a site."""
        inputs, _ = self.catalog.site(site, part).widths(part, op)
        if np.iscomplexobj(rows):
            raise CallRefused(f"site {site} takes real numbers, not {rows.dtype}; send .real and .imag as rows of their own")
        if rows.ndim != 2 or rows.shape[1] != inputs:
            raise CallRefused(f"site {site} takes rows of {inputs} numbers, not an array of shape {rows.shape}")

    def ask(self, ask: Ask, rows: Rows, dtype: Dtype = Dtype.F32) -> Rows:
        """As `call`, of rows of words that fit the path: on the ring path they are numbers as they travel."""
        inputs, outputs = self.widths(ask)
        out = np.empty((len(rows), outputs), np.float32)
        step = self.rows_at_once(max(inputs, outputs))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            with self._lock:
                header = replace(ask.header(len(piece), dtype), sequence=self._number())
                out[start : start + step] = self._call(header, encode_rows(piece, dtype), outputs)
        return out

    def attempt(
        self, ask: Ask, rows: int, payload: bytes | memoryview, backoff: Backoff, source: Source = Source.ROWS
    ) -> Rows | None:
        """Sends rows of f32, or a draw, once. None if they were not answered and, after a while that was waited, others may be."""
        with self._lock:
            header = replace(ask.header(rows, Dtype.F32, source), sequence=self._number())
            answered = self._tried(lambda: self._exchange((header.to_bytes(), payload), header.sequence), backoff)
            if answered is None:
                return None
            reply, data = answered[0]
            if reply.status is Status.DONE:
                return _answer(header, reply, data, self.widths(ask)[1])
            self._refused(header, reply, backoff)
            return None

    def widths(self, ask: Ask) -> tuple[int, int]:
        """Words of 32 bits of a row that goes in and of one that comes out."""
        inputs, outputs = self.numbers(ask)
        if ask.path is not Path.RING:
            return inputs, outputs
        room = room_of(self.catalog.sites[ask.site], ask.op)
        if room is None:
            raise CallRefused(f"site {ask.site} of {self.endpoint} has no ring path")
        return room.words(inputs), room.words(outputs)

    def numbers(self, ask: Ask) -> tuple[int, int]:
        """Numbers of a row that goes in and of one that comes out."""
        return self.catalog.site(ask.site, ask.part).widths(ask.part, ask.op)

    def rows_at_once(self, width: int) -> int:
        """Most rows of one call whose wider side has `width` words."""
        limits = self.opened
        # In and out count against the tenant's bytes; half of them leaves room for the tenant's other sessions.
        message_bytes = min(_MESSAGE_BYTES, max(1, limits.max_bytes // 4))
        return max(1, min(limits.max_rows, limits.max_waiting_rows, message_bytes // (4 * width)))

    def backoff(self) -> Backoff:
        """How long a call of this session is tried."""
        return Backoff(self._limits.retry_s)

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence

    def _call(self, header: CallHeader, payload: bytes | memoryview, outputs: int) -> Rows:
        """Sends a call until it is answered with rows."""
        backoff = self.backoff()
        while True:
            frames = (header.to_bytes(), payload)
            reply, data = self._persist(lambda: self._exchange(frames, header.sequence), backoff)
            if reply.status is Status.DONE:
                return _answer(header, reply, data, outputs)
            self._refused(header, reply, backoff)
            # A refused call was not computed. It asks again under a new number, which can be no replay of anything.
            header = replace(header, sequence=self._number())

    def _refused(self, header: CallHeader, reply: ReplyHeader, backoff: Backoff) -> None:
        """Waits where a refusal may pass; raises where it does not."""
        backoff.wait(reply.retry_after_ms / 1000, self._refusal(header, reply.status))
        if reply.status is Status.DRAINING:
            self._drop()

    def _exchange(self, frames: tuple[bytes, bytes | memoryview], sequence: int) -> tuple[ReplyHeader, memoryview]:
        link = self._connected()
        deadline = time.monotonic() + self._limits.answer_s
        link.send(frames, deadline)
        self._counters += Counters(calls=1, bytes_out=sum(map(len, frames)))
        while True:
            first, second = _two(link.receive(deadline))
            if first == CONTROL:
                self._unasked(decode_from_layers(bytes(second)))
                continue
            self._counters += Counters(bytes_in=len(first) + len(second))
            reply = ReplyHeader.from_bytes(bytes(first))
            if reply.sequence == sequence:
                return reply, second
            # An answer that came after its caller had given up.

    def _refusal(self, header: CallHeader, status: Status) -> HolobiontError:
        """What to raise if retries do not help; raises at once where they cannot."""
        what = f"{header.op.name.lower()} of {header.rows} rows at site {header.site}, part {header.part}"
        if status in _REFUSED_CALLS:
            raise CallRefused(f"{self.endpoint} refused {what}: {_REFUSED_CALLS[status]}")
        if status is Status.QUOTA:
            message = f"{self.endpoint} refused {what}: the quota of tenant {self.opened.tenant!r} is used up"
            return QuotaExceeded(f"{message}; send fewer rows at once, or ask the operator for more")
        reasons = {
            Status.BUSY: "too many calls wait there",
            Status.DRAINING: "it is about to end",
            Status.SEQUENCE: "the call's number was used",
            Status.FAILED: "a fault in the executor; its log says which",
        }
        return CallRefused(f"{self.endpoint} refused {what}: {reasons[status]}; try again later")

    # --- Control ------------------------------------------------------------------------------------------------------

    def stats(self) -> SessionStats:
        """What this session has used, as the executor counted."""
        with self._lock:
            answer = self._persist(lambda: self._ask(self._connected(), GetStats()))
        if not isinstance(answer, SessionStats):
            raise _unexpected(answer)
        return answer

    def fetch(self, blob: int, offset: int, length: int) -> Iterator[bytes]:
        """A range of a blob, piece by piece. Blob ``n + 1`` is file ``n`` of the catalog."""
        end = offset + length
        while offset < end:
            request = Fetch(blob, offset, min(MAX_FETCH_BYTES, end - offset))
            with self._lock:
                piece = self._persist(lambda: self._fetched(self._connected(), request))
            yield piece
            offset += len(piece)

    def _fetched(self, link: Link, request: Fetch) -> bytes:
        answer = self._ask(link, request)
        if isinstance(answer, Refused):
            raise refusal(answer)
        if not isinstance(answer, Fetched) or (answer.blob, answer.offset) != (request.blob, request.offset):
            raise _unexpected(answer)
        if not 0 < len(answer.bytes) <= request.bytes:
            raise ProtocolError(f"{request.bytes} bytes of blob {request.blob} were asked for, {len(answer.bytes)} came")
        return answer.bytes

    def _ask(self, link: Link, message: ToLayers) -> FromLayers:
        deadline = time.monotonic() + self._limits.answer_s
        link.send([CONTROL, encode_to_layers(message)], deadline)
        while True:
            first, second = _two(link.receive(deadline))
            if first != CONTROL:
                continue  # an answer to a call that was given up
            answer = decode_from_layers(bytes(second))
            if not isinstance(answer, Draining):
                return answer
            self._unasked(answer)

    def _unasked(self, message: FromLayers) -> None:
        if isinstance(message, Draining):
            log.info("%s is about to end; calls go to its successor", self.endpoint)
        elif isinstance(message, Refused):
            raise refusal(message)

    # --- Connections --------------------------------------------------------------------------------------------------

    def _persist(self, attempt: Callable[[], T], backoff: Backoff | None = None) -> T:
        """Runs `attempt` again while what goes wrong may pass."""
        backoff = backoff or self.backoff()
        while (done := self._tried(attempt, backoff)) is None:
            pass
        return done[0]

    def _tried(self, attempt: Callable[[], T], backoff: Backoff) -> tuple[T] | None:
        """Runs `attempt`; none if what went wrong may pass, once that was waited for. A first connection is made or fails."""
        try:
            return (attempt(),)
        except ConnectionLost as lost:
            self._drop()
            if self._opened is None:
                raise ConnectionLost(f"{lost}; {self.endpoint.advice}") from lost
            log.log(logging.DEBUG if backoff.has_lost else logging.WARNING, "%s; connecting again", lost)
            backoff.has_lost = True
            backoff.wait(0, lost)
        except TryLater as later:
            self._drop()
            backoff.wait(later.after_s, later.error)
        except (CallRefused, SessionRefused):
            raise
        except BaseException:
            self._drop()  # whatever is still on its way must not meet the next call
            raise
        return None

    def keep_apart(self, other: Session) -> None:
        """Refuses, now and after every reconnection, that both sessions are at one executor."""
        apart = Apart()
        for session in (self, other):
            apart.enter(session, str(session.endpoint), session.opened.instance)
            session._apart = apart

    def after_fork(self) -> None:
        """In a child process: connection, threads and session are the parent's, and another thread may have held the lock."""
        self._lock = threading.RLock()
        self._link = None
        self._resume = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HolobiontError("a session cannot be pickled; open one in the process that needs it")

    def _drop(self, farewell_s: float = 0.0) -> None:
        if self._link is not None:
            self._link.close(farewell_s)
            self._link = None

    def _connected(self) -> Link:
        """The connection; made, and the session opened or taken over, if there is none."""
        if self._closed:
            raise HolobiontError("the session is closed; attach again")
        if self._link is None:
            link = Link(self.endpoint, self._credentials, self._limits.connect_s)
            try:
                self._open(link)
            except BaseException:
                link.close()
                raise
            self._link = link
        return self._link

    def _open(self, link: Link) -> None:
        before = self._opened
        answer = self._ask(link, self._open_message(self._resume))
        if isinstance(answer, Refused):
            if self._resume and answer.code is RefusalCode.NO_SUCH_SESSION:
                self._resume = 0  # a successor, or one that has let the session go: a new one, on a new connection
                raise ConnectionLost(f"{self.endpoint} has ended session {before.session if before else 0}")
            raise refusal(answer)
        if not isinstance(answer, Opened):
            raise _unexpected(answer)
        if self._apart is not None:
            self._apart.enter(self, str(self.endpoint), answer.instance)
        if before is None or before.instance != answer.instance:
            self._learn(link, answer)
        if before is not None:
            self._counters += Counters(reconnects=1)
        self._opened, self._resume = answer, answer.session
        level = logging.INFO if before is None else logging.WARNING
        log.log(level, "%s: session %d, tenant %r, masking %s", self.endpoint, answer.session, answer.tenant, self.masking)

    def _open_message(self, session: int) -> Open:
        # Inside TLS the key was said in the ZeroMQ handshake; a private socket has none.
        key = (self._credentials.api_key or "") if isinstance(self.endpoint, LocalEndpoint) else ""
        return Open(LAYER_VERSION, 0, key, self._name, self.masking, session)

    def _learn(self, link: Link, opened: Opened) -> None:
        """Fetches the catalog; a successor must serve the same base."""
        if not 0 < opened.catalog_bytes <= MAX_CATALOG_BYTES:
            raise ProtocolError(f"the executor announces a catalog of {opened.catalog_bytes} bytes")
        data = bytearray()
        while len(data) < opened.catalog_bytes:
            length = min(MAX_FETCH_BYTES, opened.catalog_bytes - len(data))
            data += self._fetched(link, Fetch(CATALOG, len(data), length))
        catalog = decode_catalog(bytes(data))
        if self._catalog is not None and self._catalog != catalog:
            raise BaseChanged(f"{self.endpoint} now serves {catalog.model}, another base; build and attach the model anew")
        self._catalog = catalog


def _answer(header: CallHeader, reply: ReplyHeader, data: memoryview, outputs: int) -> Rows:
    """The rows of an answer, which are those that were asked for."""
    if reply.rows != header.rows or reply.dtype is not header.dtype:
        raise ProtocolError(f"{header.rows} rows were sent and {reply.rows} came back")
    return decode_rows(data, reply.dtype, header.rows, outputs)


def _unexpected(answer: FromLayers) -> ProtocolError:
    return ProtocolError(f"the executor answered with {type(answer).__name__}, which was not asked for")


def _two(frames: list[memoryview]) -> tuple[memoryview, memoryview]:
    """A message's two frames; a refusal may come as one."""
    if len(frames) == 1:
        return frames[0], memoryview(b"")
    if len(frames) != 2:
        raise ProtocolError(f"a message has two frames, not {len(frames)}")
    return frames[0], frames[1]
