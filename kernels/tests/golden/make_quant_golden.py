"""Makes quant.bin: blocks of every stored type and the values they stand for, decoded by the `gguf` package.

    python make_quant_golden.py quant.bin        (needs: gguf, numpy)

Codes are random bytes; scales and minima are random halves of a size that trained weights have, and a last block of
each type has the largest finite scale. The file is one record after another, little-endian:

    name [8 bytes, padded with 0] | elements u32 | bytes u32 | the stored bytes | elements x f32
"""

import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

# Where a block keeps its halves (scale, minimum).
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.MXFP4: [],
}


def quantized(kind: Type, blocks: int, rng: np.random.Generator) -> np.ndarray:
    data = rng.integers(0, 256, (blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0.0, 0.02, blocks).astype(np.float16)
        halves[-1] = np.finfo(np.float16).max
        data[:, at : at + 2] = halves.view(np.uint8).reshape(blocks, 2)
    if kind == Type.MXFP4:
        # Exponents of powers of two: the smallest, usual ones, and one whose largest values still are finite.
        data[:, 0] = [0, 120, 127, 250]
    return data.reshape(-1)


def floats(kind: Type, rng: np.random.Generator) -> np.ndarray:
    values = rng.normal(0.0, 0.5, 48).astype(np.float32)
    if kind == Type.F16:
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def main(path: str) -> None:
    rng = np.random.default_rng(20)
    with open(path, "wb") as out:
        for kind in [Type.F16, Type.BF16, *HALVES]:
            data = quantized(kind, 4, rng) if kind in HALVES else floats(kind, rng)
            values = dequantize(data, kind).astype("<f4").reshape(-1)
            out.write(struct.pack("<8sII", kind.name.encode(), values.size, data.size))
            out.write(data.tobytes())
            out.write(values.tobytes())


if __name__ == "__main__":
    main(sys.argv[1])
