"""Rows of numbers as they travel: 32 bits, or the upper 16 of these rounded to the nearest even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import ProtocolError
from .protocol import Dtype

__all__ = ["Rows", "decode_rows", "encode_rows"]

Rows = npt.NDArray[np.float32]
"""A matrix of shape ``[rows, features]``."""


def encode_rows(rows: Rows, dtype: Dtype) -> memoryview | bytes:
    """The bytes of a message's second frame. For F32 the rows' own memory, not a copy."""
    rows = np.ascontiguousarray(rows, dtype="<f4")
    if dtype is Dtype.F32:
        view: memoryview = rows.data
        return view.cast("B") if rows.size else b""
    bits = rows.view("<u4")
    # Adding half of what is cut off, less one where the rest is even, rounds ties to even. NaN must stay one.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    data: bytes = np.where(np.isnan(rows), quiet, rounded).astype("<u2").tobytes()
    return data


def decode_rows(data: bytes | memoryview, dtype: Dtype, rows: int, features: int) -> Rows:
    """The matrix in a message's second frame, as a copy that may be written to."""
    wanted = rows * features * dtype.bytes
    if len(data) != wanted:
        raise ProtocolError(f"{rows} rows of {features} numbers are {wanted} bytes; {len(data)} came")
    if dtype is Dtype.F32:
        return np.frombuffer(data, "<f4").reshape(rows, features).astype(np.float32)
    bits = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
    wide: Rows = bits.view(np.float32)
    return wide.reshape(rows, features)
