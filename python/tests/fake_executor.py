"""A small executor in Python: a ROUTER socket, numpy weights, and faults on demand.

It knows nothing of batching and quotas, but checks what it is sent, so that a client that lies is found out.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from holobiont.fixed_point import pack, room_of, unpack
from holobiont.protocol import (
    CATALOG,
    CONTROL,
    LAYER_VERSION,
    MAX_FETCH_BYTES,
    CallHeader,
    Catalog,
    Close,
    Fetch,
    Fetched,
    GetStats,
    Op,
    Open,
    Opened,
    Part,
    Path,
    RefusalCode,
    Refused,
    ReplyHeader,
    Ring,
    SessionStats,
    Site,
    SkeletonFile,
    Source,
    Status,
    decode_to_layers,
    encode_catalog,
    encode_from_layers,
)
from holobiont.seeded_rows import Draw
from holobiont.wire_dtype import decode_rows, encode_rows


@dataclass
class Weights:
    """A linear layer: `[outputs, inputs]` and `[outputs]`."""

    name: str
    weight: np.ndarray
    bias: np.ndarray | None = None


# Weights on the ring path are multiples of this power of two.
WEIGHT_EXPONENT = -20


def integers(layers):
    """The whole numbers that the weights of layers side by side are taken for: `[outputs, inputs]`."""
    weight = np.concatenate([layer.weight for layer in layers]).astype(np.float64)
    return np.rint(np.ldexp(weight, -WEIGHT_EXPONENT)).astype(np.int64)


@dataclass
class Faults:
    """What goes wrong next."""

    refuse: deque = field(default_factory=deque)
    """Pairs of status and milliseconds; each refuses one call."""
    refuse_open: deque = field(default_factory=deque)
    """Each refuses one Open."""
    swallow: int = 0
    """Calls that are computed and whose connection is lost before the answer."""
    draining: int = 0
    """Answers before which Draining is announced."""
    echo_twice: int = 0
    """Answers that are sent twice."""


class FakeExecutor:
    """Serves `sites` (lists of layers that share their input) at `address` until it is closed; exactly, too, if `is_exact`."""

    _instances = itertools.count(1)

    def __init__(self, path, sites, *, max_rows=256, key=None, files=(), name="fake", paths=7, is_exact=False):
        self.address = f"ipc://{path}"
        self.faults = Faults()
        self.calls: list[CallHeader] = []
        self.opens: list[Open] = []
        self.rows: list[np.ndarray] = []
        self.payloads: list[bytes] = []
        """Of all calls, refused ones among them."""
        self.sites, self.max_rows, self.key, self.files = sites, max_rows, key, list(files)
        self.instance, self._numbers, self._sessions = next(self._instances), itertools.count(1), {}
        self.is_exact, paths = is_exact, paths | 8 * is_exact
        rings = [_ring(layers) if is_exact else None for layers in sites]
        shape = tuple(
            Site(len(s[0].weight[0]), paths, tuple(_part(layer) for layer in s), ring)
            for s, ring in zip(sites, rings)
        )
        listed = tuple(SkeletonFile(n, len(data), ranges) for n, data, ranges in self.files)
        self.catalog = Catalog(name, "test", bytes(32), 64, 0, 0, shape, listed)
        self._context = zmq.Context()
        self._authenticator = None
        if key is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_plain(passwords={"key": key})
        self._start()

    # --- Life ---------------------------------------------------------------------------------------------------------

    def _start(self):
        self._commands = queue.Queue()
        self._router = self._bind()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _bind(self):
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.plain_server = self.key is not None
        router.bind(self.address)
        return router

    def stop(self):
        """Ends like a process that is killed."""
        self._commands.put("stop")
        self._thread.join(10)

    def restart(self):
        """A successor that knows nothing of its sessions."""
        self.stop()
        self.instance = next(self._instances)
        self._sessions.clear()
        self._start()

    def close(self):
        self.stop()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _run(self):
        while self._commands.empty():
            if self._router.poll(20):
                who, *frames = self._router.recv_multipart()
                answers = self._answer(frames)
                if answers is None:
                    self._router.close()
                    self._router = self._bind()
                    continue
                for answer in answers:
                    self._router.send_multipart([who, *answer])
        self._router.close()

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _answer(self, frames):
        """Answers to one message; None to lose every connection instead."""
        assert len(frames) == 2, "a message has two frames"
        if frames[0] == CONTROL:
            answer = self._control(decode_to_layers(frames[1]))
            return [] if answer is None else [[CONTROL, encode_from_layers(answer)]]
        header, data = self._call(CallHeader.from_bytes(frames[0]), frames[1])
        if self.faults.swallow:
            self.faults.swallow -= 1
            return None
        answers = [[header.to_bytes(), data]]
        if self.faults.draining:
            from holobiont.protocol import Draining

            self.faults.draining -= 1
            answers.insert(0, [CONTROL, encode_from_layers(Draining())])
        if self.faults.echo_twice:
            self.faults.echo_twice -= 1
            answers *= 2
        return answers

    def _control(self, message):
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Fetch):
            blob = encode_catalog(self.catalog) if message.blob == CATALOG else self.files[message.blob - 1][1]
            assert message.bytes <= MAX_FETCH_BYTES
            return Fetched(message.blob, message.offset, blob[message.offset : message.offset + message.bytes])
        if isinstance(message, GetStats):
            return SessionStats(len(self.calls), 0, (0, 0, 0, 0, 0), 0, 0, 0, 0, 0)
        assert isinstance(message, Close)
        return None

    def _open(self, message):
        self.opens.append(message)
        if self.faults.refuse_open:
            return self.faults.refuse_open.popleft()
        assert message.version == LAYER_VERSION
        if message.session and message.session not in self._sessions:
            return Refused(RefusalCode.NO_SUCH_SESSION, "there is no such session", 0)
        if message.masking not in ("off", "paper", "shares", "pads"):
            return Refused(RefusalCode.MASKING, f"masking {message.masking} is unknown", 0)
        session = message.session or next(self._numbers)
        self._sessions[session] = message
        size = len(encode_catalog(self.catalog))
        return Opened(session, self.instance, "tester", size, self.max_rows, 16384, 256 << 20)

    def _call(self, call, payload):
        self.calls.append(call)
        self.payloads.append(bytes(payload))
        if self.faults.refuse:
            status, after_ms = self.faults.refuse.popleft()
            return ReplyHeader(status, call.dtype, after_ms, 0, call.sequence), b""
        assert call.rows <= self.max_rows
        layers = self.sites[call.site] if call.part is None else [self.sites[call.site][call.part]]
        if call.path is Path.RING:
            return self._exact(call, payload, layers)
        weight = np.concatenate([layer.weight for layer in layers]).astype(np.float32)
        inputs = weight.shape[0] if call.op is Op.BACKWARD else weight.shape[1]
        x = decode_rows(payload, call.dtype, call.rows, inputs)
        self.rows.append(x)
        out = x @ weight if call.op is Op.BACKWARD else x @ weight.T
        if call.op is Op.FORWARD:
            out = out + np.concatenate([_bias(layer) for layer in layers])
        data = bytes(encode_rows(out.astype(np.float32), call.dtype))
        return ReplyHeader(Status.DONE, call.dtype, 0, call.rows, call.sequence, 5, call.rows), data


    def _exact(self, call, payload, layers):
        assert self.is_exact and call.op is not Op.FORWARD
        weight, room = integers(layers).view(np.uint64), self.room(call)
        weight = weight if call.op is Op.BACKWARD else weight.T
        if call.source is Source.DRAW:
            x = Draw.from_bytes(bytes(payload)).rows(call.rows, len(weight), room)
        else:
            x = unpack(np.frombuffer(payload, "<f4").reshape(call.rows, -1), room)
        self.rows.append(x)
        out = x @ weight  # numpy's own loops, which wrap around
        return ReplyHeader(Status.DONE, call.dtype, 0, call.rows, call.sequence, 5, call.rows), pack(out, room).tobytes()

    def room(self, call):
        """What rows of a call's site are, if they are whole numbers."""
        return room_of(self.catalog.sites[call.site], call.op)


def _ring(layers):
    magnitudes = np.abs(integers(layers))
    sums = (int(magnitudes.sum(axis=1).max()), int(magnitudes.sum(axis=0).max()))
    return Ring(WEIGHT_EXPONENT, sums, hashlib.sha256(integers(layers).tobytes()).digest())


def _part(layer):
    return Part(layer.name, len(layer.weight), int(layer.bias is not None))


def _bias(layer):
    return np.zeros(len(layer.weight), np.float32) if layer.bias is None else layer.bias
