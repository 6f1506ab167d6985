"""How activations are kept from the executor: not at all, by the paper's scheme, by pads, or by two executors that do not collude.

`paper` (Symbiosis, section 3.8) adds noise ``n`` to every row and subtracts its effect ``n W`` from the answer. The executor
computed that effect itself, so it has seen the noise: an executor that keeps its messages can subtract it again. The scheme
stops a reader of single messages, not a curious executor. It is *obfuscation*: do not rely on it for secrecy.

`pads` (see `holobiont.one_time_pads`) is sound against the executor, `shares` (`holobiont.secret_sharing`) against either of two.
``docs/guides/privacy.md`` says who sees what.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .errors import MaskingRefused
from .fork_safety import renewed_in_forks
from .modular import Bare, Exact, Route
from .one_time_pads import Padded
from .pool import Pool
from .protocol import Class, Dtype, Op, Path
from .secret_sharing import Shares
from .session import Session
from .verification import Checks
from .wire_dtype import Rows

__all__ = ["Evaluator", "Paper", "Plain", "evaluator", "path_of"]


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


def path_of(session: Session, path: Path | None, checks: Checks | None = None) -> Path:
    """The arithmetic where none was said: that of the masking mode, and of answers that are checked."""
    usual = Path.RING if session.masking in _ASIDE or checks is not None else Path.LINEAR
    return usual if path is None else path


# What hides rows in modes that are exact, and how it is named.
_ASIDE: dict[str, tuple[type[Session | Pool], str]] = {
    "shares": (Session, "second=ADDRESS, an executor of another operator"),
    "pads": (Pool, "pads=DIRECTORY, where 'holobiont-client pads prepare' has made some"),
}


def evaluator(
    session: Session, path: Path, dtype: Dtype | None, aside: Session | Pool | None = None, checks: Checks | None = None
) -> Evaluator:
    """What the session's masking mode calls for. Refuses what would weaken it, and what has no meaning in it.

    `aside` is what rows are hidden with: the second executor of ``"shares"``, the pool of ``"pads"``. `checks` are what answers are
    checked with.
    """
    mode = session.masking
    if checks is not None:
        if path is not Path.RING:
            raise MaskingRefused("only exact answers can be checked: say path='ring', masking='pads' or masking='shares'")
        checks.expect(session)
    if mode in _ASIDE:
        return _hidden(session, path, dtype, aside, checks)
    if aside is not None:
        kind, other = ("a second executor is", "shares") if isinstance(aside, Session) else ("pads are", "pads")
        raise MaskingRefused(f"{kind} nothing for masking={mode!r}; say masking={other!r}")
    if mode == "off":
        return _exact(Bare(session), dtype, checks) if path is Path.RING else Plain(session, path, dtype)
    if mode != "paper":
        # An executor may know other modes; what this package cannot do must not become something weaker.
        raise MaskingRefused(f"masking={mode!r} is no mode of this package: it has 'off', 'paper', 'pads' and 'shares'")
    if path is not Path.LINEAR:
        raise MaskingRefused("masking='paper' needs path='linear': the other paths round activations, and noise with them")
    if dtype is Dtype.BF16:
        raise MaskingRefused("masking needs dtype='f32': bf16 would round the masked rows")
    return Paper(session)


def _exact(route: Route, dtype: Dtype | None, checks: Checks | None) -> Exact:
    if dtype is Dtype.BF16:
        raise MaskingRefused("bf16 would round what is exact; use dtype='f32'")
    return Exact(route, checks)


def _hidden(
    session: Session, path: Path, dtype: Dtype | None, aside: Session | Pool | None, checks: Checks | None
) -> Exact:
    mode = session.masking
    kind, how = _ASIDE[mode]
    if path is not Path.RING:
        raise MaskingRefused(f"masking={mode!r} computes exactly: leave path out, or say path='ring'")
    if not isinstance(aside, kind):
        raise MaskingRefused(f"masking={mode!r} takes {how}")
    if isinstance(aside, Pool):
        return _exact(Padded(session, aside), dtype, checks)
    if aside.masking != mode:
        raise MaskingRefused("the second executor's session is to be opened with masking='shares', as the first one's")
    return _exact(Shares(session, aside), dtype, checks)
