"""Rows of floats as whole numbers, and back: bit for bit as ``client/src/masking/fixed_point.rs`` has it.

A row becomes whole numbers times a power of two that is chosen for the row: as many bits of its largest number are kept as the
weights leave room for. What weights make of such rows is exact modulo 2^48 or 2^64, and far enough below that to have a sign.
Here numbers have 64 bits; where they travel they are their lower six or eight bytes, one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .protocol import Op, Site
from .wire_dtype import Rows

__all__ = ["Exponents", "Room", "Whole", "from_whole", "less", "pack", "room_for", "room_of", "to_whole", "unpack"]

Whole = npt.NDArray[np.uint64]
"""A matrix of whole numbers with signs, modulo 2^64: ``[rows, features]``."""

Exponents = npt.NDArray[np.int64]
"""Of the powers of two that the rows of a matrix are multiples of."""

_MAX_BITS = 30
# Bytes of a number, and the bits that rows have at least where numbers have so many.
_LEAST_BITS = ((6, 18), (8, 12))
# Bits of a number that an answer does not have: with one more it could wrap around.
_SPARE_BITS = 2
_F64_EXPONENTS = (-1022, 1023)


@dataclass(frozen=True)
class Room:
    """What rows of a site are on the ring path, in one direction."""

    number_bytes: int
    bits: int
    """That the magnitudes of a row's numbers have at most."""

    def words(self, numbers: int) -> int:
        """Words of 32 bits of a row of so many numbers."""
        return numbers * self.number_bytes // 4


def room_for(l1: int, is_even: bool) -> Room | None:
    """That of weights whose magnitudes come to `l1`; rows have an even number of numbers both ways if `is_even`. None if too few bits are left."""
    for number_bytes, least in _LEAST_BITS:
        bits = min(8 * number_bytes - _SPARE_BITS - max(l1 - 1, 0).bit_length(), _MAX_BITS)
        # Rows are whole words of 32 bits where they travel.
        if bits >= least and (is_even or number_bytes == 8):
            return Room(number_bytes, bits)
    return None


def room_of(site: Site, op: Op) -> Room | None:
    """That of a site; none if it has no ring path."""
    if site.ring is None:
        return None
    is_even = not any(size % 2 for size in [site.columns, *(part.rows for part in site.parts)])
    return room_for(site.ring.l1[op is Op.BACKWARD], is_even)


def pack(numbers: Whole, room: Room) -> Rows:
    """Rows as they travel, never taken for floats."""
    count, width = numbers.shape
    data = np.ascontiguousarray(numbers, "<u8").view(np.uint8).reshape(count, width, 8)[:, :, : room.number_bytes]
    return np.ascontiguousarray(data).reshape(count, width * room.number_bytes).view("<f4")


def unpack(words: Rows, room: Room) -> Whole:
    """Rows that travelled."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, room.number_bytes)
    wide = np.zeros((*data.shape[:2], 8), np.uint8)
    wide[:, :, : room.number_bytes] = data
    return _signed(wide.view("<u8")[:, :, 0], room)


def less(answer: Whole, effect: Whole, room: Room) -> Whole:
    """What is left of an answer without what weights make of pads."""
    return _signed(answer - effect, room)


def _signed(words: Whole, room: Room) -> Whole:
    """The numbers that the lower bytes of words are."""
    above = np.uint64(64 - 8 * room.number_bytes)
    numbers: Whole = ((words << above).view(np.int64) >> above.astype(np.int64)).view(np.uint64)
    return numbers


def to_whole(rows: Rows, bits: int) -> tuple[Whole, Exponents]:
    """Whole numbers below ``2^bits`` in magnitude, and what they are multiples of. Every number has to be finite."""
    wide = rows.astype(np.float64)
    largest = np.abs(wide).max(axis=1, initial=0.0)
    # The mantissa that numpy splits off is below 1.
    exponents = np.frexp(largest)[1].astype(np.int64) - bits
    # The largest may be rounded up to the next power of two.
    exponents += np.rint(largest * _power_of_two(-exponents)) >= 2.0**bits
    exponents[largest == 0] = 0
    whole = np.rint(wide * _power_of_two(-exponents)[:, None]).astype(np.int64)
    return whole.view(np.uint64), exponents


def from_whole(whole: Whole, exponents: Exponents) -> Rows:
    """The floats that are nearest to whole numbers with a sign, times a power of two for each row."""
    # Rounded once, to 24 bits; the product is exact, but where it is too small or too large for a float.
    rounded = whole.view(np.int64).astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        rows: Rows = (rounded * _power_of_two(exponents)[:, None]).astype(np.float32)
    return rows


def _power_of_two(exponents: Exponents) -> npt.NDArray[np.float64]:
    """Beyond what a float of 64 bits holds, 0 or infinity."""
    lowest, highest = _F64_EXPONENTS
    powers = np.ldexp(1.0, np.clip(exponents, lowest, highest).astype(np.int32))
    return np.where(exponents < lowest, 0.0, np.where(exponents > highest, np.inf, powers))
