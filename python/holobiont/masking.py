"""How activations are kept from the executor: not at all, or by the paper's scheme, which is *obfuscation*.

`paper` (Symbiosis, section 3.8) adds noise ``n`` to every row and subtracts its effect ``n W`` from the answer. The executor
computed that effect itself, so it has seen the noise: an executor that keeps its messages can subtract it again. The scheme
stops a reader of single messages, not a curious executor. Do not rely on it for secrecy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .errors import MaskingRefused
from .forks import renewed_in_forks
from .numbers import Rows
from .protocol import Class, Dtype, Op, Path
from .session import Session

__all__ = ["Evaluator", "Paper", "Plain", "evaluator"]


class Evaluator(Protocol):
    """Whoever takes rows through a site and hides them, or not, on the way."""

    @property
    def session(self) -> Session:
        """Through which they go."""
        ...

    def evaluate(self, site: int, part: int | None, op: Op, urgency: Class, rows: Rows, exact: Dtype = Dtype.F32) -> Rows:
        """``[rows, inputs]`` to ``[rows, outputs]``; `exact` is what holds the rows, and whatever the answer is cast to."""
        ...


@dataclass(frozen=True)
class Plain:
    """The executor sees what is computed. Without a `dtype`, rows travel as what holds them exactly."""

    session: Session
    path: Path
    dtype: Dtype | None

    def evaluate(self, site: int, part: int | None, op: Op, urgency: Class, rows: Rows, exact: Dtype = Dtype.F32) -> Rows:
        path = Path.LINEAR if op is Op.BACKWARD else self.path
        dtype = exact if self.dtype is None else self.dtype
        return self.session.call(site, rows, part=part, op=op, path=path, urgency=urgency, dtype=dtype)


@dataclass
class _Noises:
    """The noises of one site, part and direction, and what they become there."""

    size: float
    noise: Rows
    effect: Rows
    next: int = 0


# Noise much larger than what it hides costs digits, much smaller noise hides nothing: beyond this ratio it is drawn anew.
_MISFIT = 16.0


class Paper:
    """Rotating noises with precomputed effects: obfuscation.

    `noises` are kept for each site and direction; their standard deviation is `scale` times the root mean square of the
    first rows that come along. Gradients are masked like activations: ``g_x = (g + m) W - m W``.
    """

    def __init__(self, session: Session, noises: int = 8, scale: float = 4.0) -> None:
        if noises < 1 or not scale > 0:
            raise MaskingRefused("masking needs at least one noise, and a scale above 0")
        if not all(site.has_linear for site in session.catalog.sites):
            raise MaskingRefused("the base has sites without the linear path; masking through them would change answers")
        self.session = session
        self._count = noises
        self._scale = scale
        self.after_fork()
        renewed_in_forks(self)

    def after_fork(self) -> None:
        """Noises of its own, also in a child process: shared ones would show what two processes have in common."""
        self._lock = threading.Lock()
        self._noises: dict[tuple[int, int | None, bool], _Noises] = {}
        self._random = np.random.default_rng()  # seeded by the operating system

    def evaluate(self, site: int, part: int | None, op: Op, urgency: Class, rows: Rows, exact: Dtype = Dtype.F32) -> Rows:
        """Masked rows have digits of their own, whatever held the rows: they travel with all of them."""
        with self._lock:
            noises = self._fitting(site, part, op, float(np.sqrt(np.mean(np.square(rows, dtype=np.float64)))))
            turns = np.arange(noises.next, noises.next + len(rows)) % self._count
            noises.next = int(turns[-1] + 1) % self._count
        masked = rows + noises.noise[turns]
        answer = self.session.call(site, masked, part=part, op=op, path=Path.LINEAR, urgency=urgency)
        answer -= noises.effect[turns]
        return answer

    def _fitting(self, site: int, part: int | None, op: Op, size: float) -> _Noises:
        """Noises for rows of root mean square `size`; their effects are computed now if there are none yet."""
        key = (site, part, op is Op.BACKWARD)
        found = self._noises.get(key)
        if found is not None and (size == 0 or size / _MISFIT <= found.size <= size * _MISFIT):
            return found
        width, _ = self.session.catalog.site(site, part).widths(part, op)
        size = size or 1.0
        noise = self._random.standard_normal((self._count, width), dtype=np.float32) * np.float32(self._scale * size)
        effect_op = Op.BACKWARD if op is Op.BACKWARD else Op.FORWARD_NO_BIAS
        effect = self.session.call(site, noise, part=part, op=effect_op, path=Path.LINEAR, urgency=Class.NOISE)
        made = _Noises(size, noise, effect)
        self._noises[key] = made
        return made


def evaluator(session: Session, path: Path, dtype: Dtype | None) -> Evaluator:
    """What the session's masking mode calls for. Refuses what would weaken it."""
    if session.masking == "off":
        return Plain(session, path, dtype)
    if session.masking != "paper":
        # An executor knows the sound modes, too; what this package cannot do must not become something weaker.
        raise MaskingRefused(f"masking={session.masking!r} is no mode of this package: use 'paper', or holobiont-client and its modes")
    if path is not Path.LINEAR:
        raise MaskingRefused("masking needs path='linear': the fast path rounds activations, and noise with them")
    if dtype is Dtype.BF16:
        raise MaskingRefused("masking needs dtype='f32': bf16 would round the masked rows")
    return Paper(session)
