"""TLS for a library that has none: libzmq speaks to a private Unix socket, a thread carries the bytes through TLS 1.3.

One relay carries one connection. It has no opinion about the bytes and ends when either side does; whoever holds the
ZeroMQ socket notices and asks for a new relay.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import tempfile
import threading

from .endpoint import Credentials, TlsEndpoint
from .errors import ConnectionLost, UntrustedExecutor

__all__ = ["Relay"]

# What one side may be ahead of the other. Full means: stop reading until the other side has taken some.
_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
_ACCEPT_S = 10.0
_FAREWELL_S = 0.25
# ZMTP: a greeting, then one short command whose reason has at most 255 bytes.
_GREETING_BYTES = 64
_OPENING_BYTES = _GREETING_BYTES + 2 + 6 + 1 + 255


class Relay:
    """A connection to `endpoint`, reachable at `address` by the one ZeroMQ socket that connects to it.

    Raises `UntrustedExecutor` if the certificate is not good for the host, `ConnectionLost` if nobody answers.
    """

    def __init__(self, endpoint: TlsEndpoint, credentials: Credentials, timeout_s: float) -> None:
        remote = _dial(endpoint, credentials, timeout_s)
        self._folder = tempfile.TemporaryDirectory(prefix="holobiont-")  # only its owner may enter
        path = os.path.join(self._folder.name, "relay")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(_ACCEPT_S)
        self.address = f"ipc://{path}"
        self.failure: str | None = None
        """Why the connection ended, once it has and the reason is known."""
        self.opening = bytearray()
        """The first bytes that came from the executor."""
        self._thread = threading.Thread(target=self._run, args=(listener, remote), name="holobiont-tls", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, which ends once the ZeroMQ socket has been closed."""
        self._thread.join(timeout_s)

    def refusal(self) -> str | None:
        """What the executor said instead of completing the ZeroMQ handshake, if it said something.

        libzmq passes on no more than that it failed, and the difference between a wrong key and a lost connection only
        where the reason is a number.
        """
        command = bytes(self.opening[_GREETING_BYTES:])
        if command[:1] != b"\x04" or command[2:8] != b"\x05ERROR":
            return None
        return command[9 : 9 + command[8]].decode(errors="replace") if len(command) > 8 else None

    def _run(self, listener: socket.socket, remote: ssl.SSLSocket) -> None:
        try:
            with remote:
                with listener:
                    local, _ = listener.accept()
                with local:
                    self._folder.cleanup()
                    try:
                        _Pump(local, remote, self.opening).run()
                    finally:
                        _await_end(local)
                        _end(local, remote)
        except OSError as error:
            self.failure = str(error)
        finally:
            self._folder.cleanup()


def _await_end(local: socket.socket) -> None:
    """Gives the ZeroMQ socket's owner a moment to take what came last, and to end: libzmq throws away what nobody has taken
    of a connection that ends by itself."""
    local.settimeout(_FAREWELL_S)
    with contextlib.suppress(OSError):
        while local.recv(_CHUNK_BYTES):
            pass


def _end(*sides: socket.socket) -> None:
    """Ends the connections themselves: a forked process has copies of them, which closing ours would leave open."""
    for side in sides:
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


def _dial(endpoint: TlsEndpoint, credentials: Credentials, timeout_s: float) -> ssl.SSLSocket:
    """A TLS connection whose server is the one meant."""
    context = credentials.tls()
    try:
        plain = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionLost(f"{endpoint} does not answer: {error}; is the executor up, with --layer-listen?") from error
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        remote = context.wrap_socket(plain, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        plain.close()
        why = f"{endpoint} has a certificate that is not trusted: {error.verify_message}"
        raise UntrustedExecutor(f"{why}; pass ca= with the certificate of the operator's authority") from error
    except OSError as error:
        plain.close()
        raise ConnectionLost(f"{endpoint} does not complete a TLS 1.3 handshake: {error}") from error
    remote.setblocking(False)
    return remote


class _Pump:
    """Carries bytes both ways until one side ends. One thread, since an SSL object is not for two."""

    def __init__(self, local: socket.socket, remote: ssl.SSLSocket, opening: bytearray) -> None:
        local.setblocking(False)
        self._local, self._remote, self._opening = local, remote, opening
        self._to_remote, self._to_local = bytearray(), bytearray()
        # What TLS said it waits for when it could not go on, if that is not what it was asked to do.
        self._remote_wants_write = False
        # What ended a side that did not end in order.
        self._failure: OSError | None = None

    def run(self) -> None:
        """Until a side has ended; raises `OSError` if that was not in order."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._local, selectors.EVENT_READ)
            selector.register(self._remote, selectors.EVENT_READ)
            interests = {self._local: selectors.EVENT_READ, self._remote: selectors.EVENT_READ}
            while self._step():
                wanted = {
                    self._local: _interest(self._to_remote, bool(self._to_local)),
                    self._remote: _interest(self._to_local, bool(self._to_remote) or self._remote_wants_write),
                }
                for side, events in wanted.items():
                    if events != interests[side]:
                        _set(selector, side, events)
                interests = wanted
                selector.select()
        if self._failure is not None:
            raise self._failure

    def _step(self) -> bool:
        """Moves what can be moved without waiting; false when a side has ended and all it said was passed on."""
        self._remote_wants_write = False
        while True:
            alive = self._read(self._local, self._to_remote) and self._read(self._remote, self._to_local)
            moved = self._write(self._remote, self._to_remote) + self._write(self._local, self._to_local)
            if not alive:
                return False
            if not moved:
                return True

    def _read(self, side: socket.socket, into: bytearray) -> bool:
        """Takes what is there, up to the buffer's limit; false at the end."""
        while len(into) < _BUFFER_BYTES:
            try:
                data = side.recv(_CHUNK_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                return True
            except ssl.SSLWantWriteError:
                self._remote_wants_write = True
                return True
            except OSError as error:  # what came before it is passed on first
                self._failure = error
                return False
            if not data:
                return False
            if side is self._remote and len(self._opening) < _OPENING_BYTES:
                self._opening += data[: _OPENING_BYTES - len(self._opening)]
            into += data
        return True

    def _write(self, side: socket.socket, waiting: bytearray) -> int:
        """Passes on what the other side takes; how many bytes that were."""
        sent = 0
        while waiting:
            try:
                with memoryview(waiting) as view:
                    count = side.send(view[:_CHUNK_BYTES])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            del waiting[:count]
            sent += count
        return sent


def _interest(read_buffer: bytearray, wants_write: bool) -> int:
    read = selectors.EVENT_READ if len(read_buffer) < _BUFFER_BYTES else 0
    return read | (selectors.EVENT_WRITE if wants_write else 0)


def _set(selector: selectors.BaseSelector, side: socket.socket, events: int) -> None:
    """Waits for `events`; for none by not being registered."""
    registered = side in selector.get_map()
    if registered and events:
        selector.modify(side, events)
    elif registered:
        selector.unregister(side)
    elif events:
        selector.register(side, events)
