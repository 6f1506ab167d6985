#!/usr/bin/env python3
"""Makes `ring.json`: rows as whole numbers and back, and rows of a key, in exact fractions and plain integers.

    make_ring.py

Nothing of this is how a client computes it: rows are rounded as fractions, and the keystream is written down as its definition has
it. Needs nothing but Python.
"""

import json
import pathlib
import random
import struct
from fractions import Fraction

SEED = 23
# Of the smallest float.
LOWEST = -149
# The bits of it.
INFINITY = 0x7F800000


def number(bits):
    """The float of these bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def floor_log2(x):
    """The exponent of the largest power of two that is not above a positive fraction."""
    at = x.numerator.bit_length() - x.denominator.bit_length()
    return at if Fraction(2) ** at <= x else at - 1


def to_whole(row, bits):
    """Exponent and whole numbers: as fine as `bits` bits of the largest one allow."""
    exact = [Fraction(x) for x in row]
    largest = max(abs(x) for x in exact)
    if not largest:
        return 0, [0] * len(row)
    exponent = floor_log2(largest) + 1 - bits
    if round(largest / Fraction(2) ** exponent) >= 1 << bits:
        exponent += 1
    return exponent, [round(x / Fraction(2) ** exponent) for x in exact]


def nearest(x, lowest):
    """A fraction with 24 bits, or a multiple of `2^lowest`; of two equally near the one that ends in 0."""
    if not x:
        return x
    unit = Fraction(2) ** max(floor_log2(abs(x)) - 23, lowest)
    return round(x / unit) * unit


def from_whole(whole, exponent):
    """The bits of the float: 24 bits of the whole number first, then what a float of that size holds."""
    rounded = nearest(Fraction(whole), -(10**6)) * Fraction(2) ** exponent
    sign = 1 << 31 if whole < 0 else 0
    try:
        return sign | bits_of(float(abs(nearest(rounded, LOWEST))))
    except OverflowError:
        return sign | INFINITY


def keystream(key, nonce, words):
    """ChaCha20 with 20 rounds, a 64-bit counter from 0 and a 64-bit nonce."""

    def quarter(s, a, b, c, d):
        for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] ^= s[x]
            s[z] = (s[z] << turn | s[z] >> (32 - turn)) & 0xFFFFFFFF

    out = []
    for block in range(-(-words // 16)):
        begin = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
        begin += [*struct.unpack("<2I", struct.pack("<Q", block)), *struct.unpack("<2I", struct.pack("<Q", nonce))]
        state = list(begin)
        for _ in range(10):
            for at in range(4):
                quarter(state, at, 4 + at, 8 + at, 12 + at)
            for at in range(4):
                quarter(state, at, 4 + (at + 1) % 4, 8 + (at + 2) % 4, 12 + (at + 3) % 4)
        out += [(x + y) & 0xFFFFFFFF for x, y in zip(state, begin)]
    return out[:words]


def rows(draw):
    """Rows that are hard: large beside small, halves, subnormal numbers, what is rounded up to a power of two; and some others."""
    hard = [
        [0.0, -0.0, 0.0],
        [1.0, -1.0, 0.5, 2.0**-30, 1.5 * 2.0**-29, 2.5 * 2.0**-29, -1.5 * 2.0**-29],
        [number(0x3FFFFFFF), -1.0, 2.0**-23],
        [number(0x7F7FFFFF), -number(0x7F7FFFFF), 1.0],
        [number(1), -number(3), number(0x007FFFFF)],
        [1000.0, 1e-4, -3e-7, number(0x3DFCD6E9)],
    ]

    def some(scale):
        return [number(bits_of(draw.gauss(0, 1) * scale)) for _ in range(17)]

    return hard + [some(scale) for scale in (1.0, 1e-20, 3e30)]


def conversion(draw, row, bits, weight_exponent):
    exponent, whole = to_whole(row, bits)
    answers = [draw.randrange(-(1 << size), 1 << size) for size in (8, 24, 25, 40, 61, 62)]
    # Halves of the last bit that is kept, and what is rounded up to one bit more.
    answers += [(1 << 24) + 1, (1 << 24) + 3, (1 << 62) - 1, 1 - (1 << 62), 0]
    back = [from_whole(answer, exponent + weight_exponent) for answer in answers]
    return {
        "bits": bits,
        "row": [bits_of(x) for x in row],
        "exponent": exponent,
        "whole": whole,
        "weight_exponent": weight_exponent,
        "answers": answers,
        "back": back,
    }


def main():
    draw = random.Random(SEED)
    conversions = [
        conversion(draw, row, bits, exponent)
        for row in rows(draw)
        for bits, exponent in ((30, -24), (23, -8), (12, 3))
    ]
    draws = []
    for first, width in ((0, 3), (1, 8), (2**32 - 1, 19), (2**64 - 1, 40)):
        key = draw.randbytes(32)
        made = []
        for row in (first, (first + 1) % 2**64):
            words = keystream(key, row, 2 * width)
            made.append([low | high << 32 for low, high in zip(words[::2], words[1::2])])
        draws.append({"key": key.hex(), "first": first, "rows": made})
    lines = {"conversions": conversions, "draws": draws}
    text = ",\n".join(f'"{name}": [\n' + ",\n".join(map(json.dumps, of)) + "\n]" for name, of in lines.items())
    (pathlib.Path(__file__).parent / "ring.json").write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    main()
