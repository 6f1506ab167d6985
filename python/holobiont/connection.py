"""One ZeroMQ connection to an executor: it is there, or it is lost. Opening another one is the session's business."""

from __future__ import annotations

import functools
import itertools
import os
import time
import weakref
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from .endpoint import Credentials, Endpoint, TlsEndpoint
from .errors import AuthenticationFailed, ConnectionLost, TimedOut
from .tls_proxy import Relay

__all__ = ["Link"]

_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000
# Far above any answer a session asks for, far below what would hurt.
_MAX_MESSAGE_BYTES = 1 << 30
_PLAIN_USER = b"key"

_LOST = {
    zmq.EVENT_DISCONNECTED: "the executor closed the connection, or stopped answering heartbeats",
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZeroMQ's protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the ZeroMQ handshake failed",
}
_EVENTS = functools.reduce(int.__or__, _LOST, int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH))


class Link:
    """A DEALER socket whose handshake is done. Not thread-safe; the session's lock guards it.

    Raises `ConnectionLost`, `AuthenticationFailed`, or `UntrustedExecutor`.
    """

    def __init__(self, endpoint: Endpoint, credentials: Credentials, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._relay: Relay | None = None
        address = str(endpoint)
        if isinstance(endpoint, TlsEndpoint):
            self._relay = Relay(endpoint, credentials, timeout_s)
            address = self._relay.address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._options(credentials)
        self._monitor = _monitor(self._socket)
        # Also if nobody closes it: freed in another order, the two would stop libzmq's thread for good.
        self._end = weakref.finalize(self, _close, self._socket, self._monitor, os.getpid())
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(address)
            self._handshake(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def _options(self, credentials: Credentials) -> None:
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection begins with Open, so the session makes it
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if self._relay is not None and credentials.api_key:
            socket.setsockopt(zmq.PLAIN_USERNAME, _PLAIN_USER)
            socket.setsockopt(zmq.PLAIN_PASSWORD, credentials.api_key.encode())

    def send(self, frames: Sequence[bytes | memoryview], deadline: float) -> None:
        """Hands a message over."""
        while True:
            self._check_events()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._wait(zmq.POLLOUT, deadline, "takes no more messages")

    def receive(self, deadline: float) -> list[memoryview]:
        """The next message. What has come is delivered before a loss is reported."""
        while True:
            if (message := self._waiting()) is not None:
                return message
            try:
                self._check_events()
            except ConnectionLost:
                # It may have come, and the connection ended, since the look above.
                if (message := self._waiting()) is not None:
                    return message
                raise
            self._wait(zmq.POLLIN, deadline, "did not answer in time")

    def _waiting(self) -> list[memoryview] | None:
        """A message that has come, if one has."""
        try:
            return [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def _wait(self, event: int, deadline: float, otherwise: str) -> None:
        """Until the socket is ready or something happened to the connection."""
        self._poller.register(self._socket, event)
        if not self._poller.poll(_left_ms(deadline)):
            raise TimedOut(f"{self._endpoint} is connected but {otherwise}; it may be stopped, or overloaded")

    def close(self, farewell_s: float = 0.0) -> None:
        """Ends the connection; what was sent has `farewell_s` to leave. A second time does nothing."""
        if self._end.detach():
            _close(self._socket, self._monitor, os.getpid(), round(1000 * farewell_s))
        if self._relay is not None:
            self._relay.join(1.0)

    def _handshake(self, deadline: float) -> None:
        try:
            while not self._check_events():
                if not self._monitor.poll(_left_ms(deadline)):
                    raise ConnectionLost(f"{self._endpoint} does not complete the ZeroMQ handshake in time")
        except ConnectionLost:
            said = self._relay.refusal() if self._relay is not None else None
            if said is None:
                raise
            raise AuthenticationFailed(f"{self._endpoint} lets nobody in without a key it knows: {said}") from None

    def _check_events(self) -> bool:
        """Reads what happened to the connection; true if the handshake was among it. Raises if it is lost."""
        done = False
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event = zmq.Event(message["event"])
            if event is zmq.Event.HANDSHAKE_FAILED_AUTH:
                raise AuthenticationFailed(f"{self._endpoint} does not accept the API key; ask its operator for one")
            if event in _LOST:
                raise ConnectionLost(f"{self._endpoint} is not connected: {self._reason(_LOST[event])}")
            done = done or event is zmq.Event.HANDSHAKE_SUCCEEDED
        return done

    def _reason(self, seen: str) -> str:
        failure = self._relay.failure if self._relay is not None else None
        return f"{seen} ({failure})" if failure else seen


_monitors = itertools.count()


def _monitor(watched: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """What happens to a socket, as messages. Its address is one that no socket before had, even one not yet gone."""
    address = f"inproc://holobiont-monitor-{next(_monitors)}"
    watched.monitor(address, _EVENTS)
    events: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.connect(address)
    return events


def _close(watched: zmq.Socket[bytes], monitor: zmq.Socket[bytes], owner: int, linger_ms: int = 0) -> None:
    """Stops the events first: libzmq waits for ever to deliver one that nobody can take any more.

    In the process `owner` alone: a fork has the sockets but not libzmq's threads, and would wait for these.
    """
    if os.getpid() != owner:
        return
    watched.monitor(None, 0)
    monitor.close()
    watched.close(linger=linger_ms)


def _left_ms(deadline: float) -> int:
    return max(0, round(1000 * (deadline - time.monotonic())))
