"""Rows of floats as whole numbers, and back: bit for bit as ``client/src/masking/fixed_point.rs`` has it.

A row becomes whole numbers times a power of two that is chosen for the row: as many bits of its largest number are kept as the
weights leave room for. What weights make of such rows is exact modulo 2^64, and below 2^62 in magnitude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .numbers import Rows

__all__ = ["Exponents", "Whole", "from_whole", "ring_bits", "to_whole"]

Whole = npt.NDArray[np.uint64]
"""A matrix of whole numbers modulo 2^64, ``[rows, features]``."""

Exponents = npt.NDArray[np.int64]
"""Of the powers of two that the rows of a matrix are multiples of."""

_MAX_BITS = 30
_MIN_BITS = 12
# With one more an answer could wrap around.
_ANSWER_BITS = 62
_F64_EXPONENTS = (-1022, 1023)


def ring_bits(l1: int) -> int | None:
    """Bits that rows may have where sums of the weights' magnitudes come to `l1`; none if there would be too few."""
    bits = min(_ANSWER_BITS - max(l1 - 1, 0).bit_length(), _MAX_BITS)
    return bits if bits >= _MIN_BITS else None


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
