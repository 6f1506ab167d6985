"""Rows that do not travel: a key, from which both sides make them (``shmproto/src/layer/seeded_rows.rs``).

Row ``n`` of a key is the keystream of ChaCha20 with the 64-bit nonce ``n``, every 6 or 8 bytes of it a number. The cipher is that of the
package `cryptography`.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field

import numpy as np

from .errors import MaskingRefused
from .fixed_point import Room, Whole, unpack

try:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
except ModuleNotFoundError:  # it is asked for when it is needed
    ChaCha20 = None  # type: ignore[assignment,misc]

__all__ = ["KEY_BYTES", "ROWS_OF_KEY", "Draw", "fresh_key"]

KEY_BYTES = 32
ROWS_OF_KEY = 1 << 64
_DRAW = struct.Struct("<32sQ")


def fresh_key() -> bytes:
    """A key that nobody can foresee. Refuses where there is no cipher to use it with."""
    _need_cipher()
    return secrets.token_bytes(KEY_BYTES)


def _need_cipher() -> None:
    if ChaCha20 is None:
        raise MaskingRefused("masking='shares' and 'pads' need the package cryptography; pip install 'holobiont[privacy]'")


@dataclass(frozen=True)
class Draw:
    """Rows of `key`, which is shown to nobody, from number `first` on."""

    key: bytes = field(repr=False)
    first: int

    def to_bytes(self) -> bytes:
        """As it travels where rows would."""
        return _DRAW.pack(self.key, self.first)

    @classmethod
    def from_bytes(cls, data: bytes) -> Draw:
        """Reads one."""
        return cls(*_DRAW.unpack(data))

    def rows(self, count: int, width: int, room: Room) -> Whole:
        """``[count, width]`` numbers; numbers of rows begin anew behind the last one there is."""
        _need_cipher()
        zeros = bytes(room.number_bytes * width)
        made = bytearray()
        for number in range(self.first, self.first + count):
            # The counter, from 0, and then the nonce.
            nonce = struct.pack("<QQ", 0, number % ROWS_OF_KEY)
            made += Cipher(ChaCha20(self.key, nonce), mode=None).encryptor().update(zeros)
        return unpack(np.frombuffer(made, "<f4").reshape(count, room.words(width)), room)
