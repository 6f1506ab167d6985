"""A pool of pads on a disk, as ``holobiont-client pads prepare`` makes it: each of them is taken out once.

A pad is burnt before it is used: the journal says that it is gone, and is on the disk, before it is read; a process or a machine
that dies loses what it has burnt, and uses nothing twice; one that ends in order gives back what it has not taken. One process
holds a pool. Files and rules are those of ``client/src/masking/pads``; their hashes are BLAKE3, of the package `blake3`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import MaskingRefused
from .fork_safety import renewed_in_forks
from .seeded_rows import KEY_BYTES, Draw

try:
    from blake3 import blake3
except ModuleNotFoundError:  # it is asked for when it is needed
    blake3 = None  # type: ignore[assignment,misc]

__all__ = ["Pad", "Pool", "Shape", "default_pads", "hash_of", "identity_of"]

_MAGIC = b"HOLOPAD3"
# Magic, sites, commitment of the weights, identity of the journal, random.
_HEAD = struct.Struct("<8sQ32sQ32s")
# Columns, outputs, bytes of a number forward and backward.
_SHAPE = struct.Struct("<4I")
_HASH_BYTES = 32
_CHECK_BYTES = 16
# Pads of a block of a file.
_BLOCK = 64
# Slots of the journal begin at a multiple of this.
_ALIGN = 4096
# Pads of a file that one generation of the journal burns, and burns at most: what is given up where a slot is broken.
_BURN_PADS = 64
_MAX_BURN_PADS = 256
_MACHINE = Path("/etc/machine-id")

_Counts = npt.NDArray[np.uint64]


def default_pads() -> Path:
    """Where ``holobiont-client`` keeps them."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "holobiont" / "pads"


def hash_of(data: bytes, key: bytes | None = None) -> bytes:
    """BLAKE3, or the same with a key."""
    if blake3 is None:
        raise MaskingRefused("masking='pads' needs the package blake3; pip install 'holobiont[privacy]'")
    return blake3(data).digest() if key is None else blake3(data, key=key).digest()


@dataclass(frozen=True)
class Pad:
    """Numbers that cover one row, once, and what the site makes of them, as it travels."""

    draw: Draw
    effect: npt.NDArray[np.float32] = field(repr=False)


class Shape(NamedTuple):
    """That of a site, and the bytes of a number there."""

    columns: int
    outputs: int
    forward_bytes: int
    backward_bytes: int


class Pool:
    """The pool in a directory, held until `close`. Raises `MaskingRefused` where there is none, or it is broken, a copy or held."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "manifest").is_file():
            raise MaskingRefused(f"there are no pads in {self.path}; make some with 'holobiont-client pads prepare'")
        with contextlib.ExitStack() as opened:
            _lock(self.path, opened)
            self._commitment, identity, self._random, self.shapes = _manifest(self.path / "manifest")
            self._journal = _Journal(self.path / "journal", 2 * len(self.shapes), opened)
            if self._journal.identity() != identity:
                raise MaskingRefused(f"{self.path} is a copy of a pool whose original may be used as well; make pads anew")
            self._files = [self._opened_file(at, opened) for at in range(2 * len(self.shapes))]
            # What was burnt by who died is lost: nobody knows how much of it was used.
            self._next = self._journal.burnt.copy()
            self._let_go = weakref.finalize(self, _end, self._journal, self._next, opened.pop_all())
        self._lock = threading.Lock()
        renewed_in_forks(self)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets it go, after a `take` that runs; a second time does nothing."""
        with self._lock:
            self._let_go()

    def after_fork(self) -> None:
        """A child process must not take what its parent takes: it has no pads."""
        self._lock = threading.Lock()
        if held := self._let_go.detach():
            _, _, (_, _, opened), _ = held
            opened.close()

    def expect(self, commitment: bytes) -> None:
        """Refuses where its pads are of other weights than these."""
        if self._commitment != commitment:
            raise MaskingRefused(f"the pads in {self.path} are of other weights than the executor's; make pads of its model")

    def left(self, site: int, backward: bool) -> int:
        """Pads of a site that are left."""
        at = 2 * site + backward
        return max(0, int(self._journal.made[at]) - int(self._next[at]))

    def take(self, site: int, backward: bool, rows: int) -> list[Pad]:
        """Takes pads for so many rows out. They are gone, also if this process ends before it uses them."""
        at = 2 * site + backward
        with self._lock:
            if not self._let_go.alive:
                raise MaskingRefused(f"the pads in {self.path} are closed, or those of the process that this one was forked from")
            if self.left(site, backward) < rows:
                what = f"{rows} pads are wanted for site {site}, {_word(at)}, and {self.left(site, backward)} are left"
                raise MaskingRefused(f"{what} in {self.path}; make more with 'holobiont-client pads prepare'")
            pads: list[Pad] = []
            end = int(self._next[at]) + rows
            while (number := int(self._next[at])) < end:
                if number >= self._journal.burnt[at]:
                    self._burn(at, end - number)
                until = min(end, int(self._journal.burnt[at]))
                # First: whatever becomes of them, they are not taken again.
                self._next[at] = until
                pads += self._read(at, number, until)
        return pads

    def _burn(self, at: int, wanted: int) -> None:
        """So many next pads of a file, or more, and the next of those in step with it: a token takes one of each."""
        burnt, made = self._journal.burnt, self._journal.made
        in_hand = burnt - np.minimum(self._next, burnt)
        pads = np.where(in_hand < _BURN_PADS // 4, _BURN_PADS, 0).astype(np.uint64)
        pads[1 - at % 2 :: 2] = 0
        pads[at] = min(max(wanted, _BURN_PADS), _MAX_BURN_PADS)
        self._journal.commit(np.minimum(burnt + pads, np.maximum(made, burnt)))

    def _read(self, at: int, first: int, until: int) -> list[Pad]:
        """Pads that are burnt already, which are erased: keys before anything is made of them, as the rest."""
        keys = self._parts(at, first, until, is_effect=False)
        effects = self._parts(at, first, until, is_effect=True)
        return [Pad(Draw(key, 0), np.frombuffer(effect, "<f4")) for key, effect in zip(keys, effects)]

    def _parts(self, at: int, first: int, until: int, *, is_effect: bool) -> list[bytes]:
        """The keys of pads, or what the site makes of them, which are erased."""
        found: list[bytes] = []
        size, key = self._part_bytes(at)[is_effect], hash_of(self._name(at).name.encode(), self._random)
        behind = (first // _BLOCK + 1) * _BLOCK
        for start in [first, *range(behind, until, _BLOCK)]:
            end = min(until, (start // _BLOCK + 1) * _BLOCK)
            place = self._place(at, start, is_effect)
            data = os.pread(self._files[at], (end - start) * size, place)
            for number in range(start, end):
                part = data[(number - start) * size :][:size]
                body, check = part[:-_CHECK_BYTES], part[-_CHECK_BYTES:]
                if hash_of(struct.pack("<Q", 2 * number + is_effect) + body, key)[:_CHECK_BYTES] != check:
                    raise _broken(self._name(at), "a pad does not fit its hash")
                found.append(body)
            os.pwrite(self._files[at], bytes(len(data)), place)
        return found

    def _name(self, at: int) -> Path:
        return self.path / f"{at // 2:05}.{_word(at)}"

    def _part_bytes(self, at: int) -> tuple[int, int]:
        """Of a key and of an effect, with their checks."""
        shape = self.shapes[at // 2]
        effect_bytes = shape.columns * shape.backward_bytes if at % 2 else shape.outputs * shape.forward_bytes
        return KEY_BYTES + _CHECK_BYTES, effect_bytes + _CHECK_BYTES

    def _place(self, at: int, number: int, is_effect: bool) -> int:
        """Where a part of a pad begins: in a block, all keys lie before all effects."""
        sizes = self._part_bytes(at)
        before = _BLOCK * sizes[0] if is_effect else 0
        return number // _BLOCK * _BLOCK * sum(sizes) + before + number % _BLOCK * sizes[is_effect]

    def _opened_file(self, at: int, opened: contextlib.ExitStack) -> int:
        file = _open(self._name(at), opened)
        made = int(self._journal.made[at])
        if made and os.fstat(file).st_size < self._place(at, made - 1, True) + self._part_bytes(at)[1]:
            raise _broken(self._name(at), "it is shorter than the journal says")
        return file


def _end(journal: _Journal, taken: _Counts, opened: contextlib.ExitStack) -> None:
    """Lets a pool go. What was burnt and not taken is whole, and nobody takes it from here any more: it burns again for who does."""
    # Otherwise it is lost, as if this process had been killed.
    with opened, contextlib.suppress(OSError):
        if (taken < journal.burnt).any():
            journal.commit(taken)


class _Journal:
    """Which pads there are, and which are gone: two slots, of the newest generation and the one before."""

    def __init__(self, path: Path, files: int, opened: contextlib.ExitStack) -> None:
        self._file, self._words = _open(path, opened), 1 + 2 * files
        slots = [slot for slot in map(self._slot, (0, 1)) if slot is not None]
        if not slots:
            raise _broken(path, "neither of its two halves is whole")
        newest = max(slots, key=lambda slot: int(slot[0]))
        self._generation, self.burnt, self.made = int(newest[0]), newest[1::2], newest[2::2]
        if len(slots) < 2:
            # What the broken one burnt is not known: as much as it may have is given up. Both are whole again then.
            self.commit(self.burnt + np.uint64(_MAX_BURN_PADS))
            self.commit(self.burnt)

    def commit(self, burnt: _Counts) -> None:
        """Writes what is burnt, and returns once it is on the disk."""
        self._generation += 1
        words = np.empty(self._words, "<u8")
        words[0], words[1::2], words[2::2] = self._generation, burnt, self.made
        body = words.tobytes()
        os.pwrite(self._file, body + hash_of(body), self._generation % 2 * self._slot_bytes())
        os.fdatasync(self._file)
        self.burnt = burnt

    def identity(self) -> int:
        """What tells this file from a copy of it, on this machine or another."""
        return identity_of(os.fstat(self._file).st_ino, _machine())

    def _slot(self, slot: int) -> _Counts | None:
        data = os.pread(self._file, 8 * self._words + _HASH_BYTES, slot * self._slot_bytes())
        body = data[:-_HASH_BYTES]
        is_whole = len(body) == 8 * self._words and hash_of(body) == data[-_HASH_BYTES:]
        return np.frombuffer(body, "<u8").astype(np.uint64) if is_whole else None

    def _slot_bytes(self) -> int:
        return -(-(8 * self._words + _HASH_BYTES) // _ALIGN) * _ALIGN


def _manifest(path: Path) -> tuple[bytes, int, bytes, list[Shape]]:
    """Commitment of the weights, identity of the journal, what the pool's hashes have for a key, and the sites' shapes."""
    data = path.read_bytes()
    body, check = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if len(body) < _HEAD.size or hash_of(body) != check:
        raise _broken(path, "it does not fit its hash")
    magic, sites, commitment, identity, random = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + _SHAPE.size * sites:
        raise _broken(path, "it is of another version")
    return commitment, identity, random, [Shape(*numbers) for numbers in _SHAPE.iter_unpack(body[_HEAD.size :])]


def _lock(path: Path, opened: contextlib.ExitStack) -> None:
    """Makes a pool this process's own."""
    try:
        fcntl.flock(_open(path / "lock", opened), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MaskingRefused(f"the pads in {path} are in use, by another process or another model here; end that first") from None


def _open(path: Path, opened: contextlib.ExitStack) -> int:
    """A file that is closed with the stack."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MaskingRefused(f"the pads cannot be used: {error}") from error
    opened.callback(os.close, file)
    return file


def identity_of(inode: int, machine: bytes) -> int:
    """What a journal is known by: the first eight bytes of the BLAKE3 hash of its inode's number and of the machine's name."""
    return int.from_bytes(hash_of(struct.pack("<Q", inode) + machine)[:8], "little")


def _machine() -> bytes:
    """The name by which this machine is told from others; empty where its system has none."""
    try:
        return _MACHINE.read_bytes().strip()
    except OSError:
        return b""


def _word(at: int) -> str:
    return "backward" if at % 2 else "forward"


def _broken(path: Path, why: str) -> MaskingRefused:
    return MaskingRefused(f"{path}: {why}; delete the pool, and make pads anew with 'holobiont-client pads prepare'")
