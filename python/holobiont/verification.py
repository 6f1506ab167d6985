"""Answers checked: whether they are what the weights make of the rows (Freivalds), as ``client/src/masking/verify.rs`` has it.

With secret numbers ``s``, and ``v = s W`` that ``holobiont-client checks`` has computed from your own copy of the model, ``y = x W``
is checked by ``y s = x v``, over the integers: a wrong answer passes with less than ``2^-48``. Who knows the file can answer wrongly.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import MaskingRefused, WrongAnswer
from .fixed_point import Whole
from .modular import offers
from .protocol import Op
from .session import Ask, Session

__all__ = ["Checks"]

_FORMAT = "freivalds 1"
_DTYPES = {"U32": "<u4", "I64": "<i8", "F32": "<f4"}
# Numbers of 64 bits are cut into three, those of 31 into two, so that sums of their products are exact in floats.
_WIDE_BITS, _NARROW_BITS = 21, 16
_EXACT_TERMS = 1 << 15

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Check:
    """``secret [checks, outputs]``, and what the weights make of it, ``effect [checks, inputs]``."""

    secret: _Numbers
    effect: _Numbers


class Checks:
    """The checks in a file that ``holobiont-client checks`` wrote. Raises `MaskingRefused` where there are none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._tensors, said = _read(self.path)
            if said["format"] != _FORMAT:
                raise ValueError(said["format"])
            self._commitments = bytes.fromhex(said["commitments"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{self.path} holds no checks ({type(error).__name__}: {error})"
            raise MaskingRefused(f"{what}; make some with 'holobiont-client checks --model MODEL {self.path}'") from None

    def expect(self, session: Session) -> None:
        """Refuses where they are of other weights than those that the executor commits to."""
        shapes = [[site.outputs(part) for part in range(len(site.parts))] for site in session.catalog.sites]
        names = {f"{number}.{part}.secret" for number, parts in enumerate(shapes) for part in range(len(parts))}
        theirs = b"".join(offer.commitment for offer in offers(session))
        if theirs != self._commitments or not names <= self._tensors.keys():
            raise MaskingRefused(f"the checks in {self.path} are of other weights than those of {session.endpoint}")

    def check(self, session: Session, ask: Ask, rows: Whole, answer: Whole) -> None:
        """Raises `WrongAnswer` if an answer is not what the weights make of its row."""
        check = self._check(session, ask)
        if not _equal(rows.view(np.int64), check.effect, answer.view(np.int64), check.secret):
            raise self._wrong(session, ask.site)

    def check_bias(self, session: Session, site: int, bias: npt.NDArray[np.float32]) -> None:
        """The same for what a site adds."""
        own = self._tensors.get(f"{site}.bias")
        if own is None or own.tobytes() != np.ascontiguousarray(bias, "<f4").tobytes():
            raise self._wrong(session, site)

    def _check(self, session: Session, ask: Ask) -> _Check:
        site = session.catalog.sites[ask.site]
        if ask.op is Op.BACKWARD:
            secret, effect = self._pair(f"{ask.site}.back")
            before = 0 if ask.part is None else site.outputs_before(ask.part)
            return _Check(secret, effect[:, before : before + site.outputs(ask.part)])
        parts = range(len(site.parts)) if ask.part is None else [ask.part]
        pairs = [self._pair(f"{ask.site}.{part}") for part in parts]
        # What all parts make of a row is the sum of what each does.
        return _Check(np.concatenate([secret for secret, _ in pairs], axis=1), np.sum([effect for _, effect in pairs], axis=0))

    def _pair(self, of: str) -> tuple[_Numbers, _Numbers]:
        return self._tensors[f"{of}.secret"].astype(np.int64), self._tensors[f"{of}.effect"].astype(np.int64)

    def _wrong(self, session: Session, site: int) -> WrongAnswer:
        parts = ", ".join(part.name for part in session.catalog.sites[site].parts)
        what = f"{session.endpoint} gave a wrong answer for site {site} ({parts}): not what its weights make of the row"
        return WrongAnswer(f"{what}; nothing was made of it, and no later answer should be believed")


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The tensors of a file of safetensors, and its metadata."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    said = header.pop("__metadata__")
    tensors = {}
    for name, stored in header.items():
        start, end = stored["data_offsets"]
        tensors[name] = np.frombuffer(data[begin + start : begin + end], _DTYPES[stored["dtype"]]).reshape(stored["shape"])
    return tensors, said


def _equal(rows: _Numbers, effect: _Numbers, answer: _Numbers, secret: _Numbers) -> bool:
    """Whether ``rows @ effect.T == answer @ secret.T`` in whole numbers, whatever their size."""
    # Rows and secrets are below 2^30 in magnitude.
    made, claimed = _products(rows, effect.T), _products(secret, answer.T)
    differences = {shift: sums - claimed[shift].T for shift, sums in made.items()}
    total = sum((sums.astype(object) << shift for shift, sums in differences.items()), np.zeros((len(rows), len(secret)), object))
    return not np.any(total)


def _products(narrow: _Numbers, wide: _Numbers) -> dict[int, _Numbers]:
    """``narrow @ wide`` as sums to be shifted: numbers below 2^31 in magnitude times any of 64 bits."""
    sums: dict[int, _Numbers] = {}
    for start in range(0, narrow.shape[1], _EXACT_TERMS):
        left = _cut(narrow[:, start : start + _EXACT_TERMS], _NARROW_BITS, 2)
        right = _cut(wide[start : start + _EXACT_TERMS], _WIDE_BITS, 3)
        for at, low in enumerate(left):
            for over, high in enumerate(right):
                shift = _NARROW_BITS * at + _WIDE_BITS * over
                product = (low @ high).astype(np.int64)
                sums[shift] = sums[shift] + product if shift in sums else product
    return sums


def _cut(numbers: _Numbers, bits: int, pieces: int) -> list[npt.NDArray[np.float64]]:
    """Numbers as sums of so many, each shifted by `bits` more; the last has the sign."""
    cut = [(numbers >> (bits * at)) & ((1 << bits) - 1) for at in range(pieces - 1)]
    return [piece.astype(np.float64) for piece in [*cut, numbers >> (bits * (pieces - 1))]]
