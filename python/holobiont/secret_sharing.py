"""Two executors that must not collude: one sees rows plus pads, the other a key from which it makes the pads.

``(x + r) W - r W = x W`` modulo 2^48 or 2^64. A pad is uniform there and used for no other row, so that what the first one sees has nothing
to do with ``x``; the second sees nothing that has. Whoever has what both of them saw has everything.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .errors import MaskingRefused
from .fixed_point import Room, Whole, less, pack, unpack
from .fork_safety import renewed_in_forks
from .modular import offers
from .protocol import Source
from .retries import Backoff
from .seeded_rows import ROWS_OF_KEY, Draw, fresh_key
from .session import Ask, Session

__all__ = ["Shares"]


class Shares:
    """The route over the executors of `session` and of a `second` one, which are never to meet in one process."""

    def __init__(self, session: Session, second: Session) -> None:
        _same_weights(session, second)
        session.keep_apart(second)
        self.session = session
        self._second = second
        self.after_fork()
        renewed_in_forks(self)

    def after_fork(self) -> None:
        """A key of its own, also in a child process: rows of a shared one would be used twice."""
        self._lock = threading.Lock()
        self._key = fresh_key()
        self._first = 0

    def call(self, ask: Ask, room: Room, rows: Whole) -> Whole:
        step = min(session.rows_at_once(max(session.widths(ask))) for session in (self.session, self._second))
        out: Whole = np.empty((len(rows), self.session.numbers(ask)[1]), np.uint64)
        for start in range(0, len(rows), step):
            backoffs = (self.session.backoff(), self._second.backoff())
            while (answer := self._attempt(ask, room, rows[start : start + step], backoffs)) is None:
                pass
            out[start : start + step] = answer
        return out

    def _take(self, rows: int) -> Draw:
        """Rows of the key that nobody had, and nobody will have."""
        with self._lock:
            if self._first + rows > ROWS_OF_KEY:
                raise MaskingRefused("all rows of this session's key are used up; attach again")
            draw = Draw(self._key, self._first)
            self._first += rows
        return draw

    def _attempt(self, ask: Ask, room: Room, rows: Whole, backoffs: tuple[Backoff, Backoff]) -> Whole | None:
        """One attempt, with pads of its own; none if it is worth another."""
        draw = self._take(len(rows))
        masked = draw.rows(*rows.shape, room)
        masked += rows
        with ThreadPoolExecutor(1) as beside:
            # The key first: the second executor computes while the rows are on their way to the first.
            effect = beside.submit(
                self._second.attempt, ask, len(rows), draw.to_bytes(), backoffs[1], source=Source.DRAW
            )
            answer = self.session.attempt(ask, len(rows), pack(masked, room).data.cast("B"), backoffs[0])
        taken = effect.result()
        if answer is None or taken is None:
            return None
        return less(unpack(answer, room), unpack(taken, room), room)


def _same_weights(session: Session, second: Session) -> None:
    """Refuses executors that have other weights than each other, or say so."""
    own, theirs = offers(session), offers(second)
    sites, others = session.catalog.sites, second.catalog.sites
    if len(own) != len(theirs):
        raise MaskingRefused(f"{second.endpoint} has other weights than {session.endpoint}: another number of sites")
    for number, (site, other) in enumerate(zip(sites, others)):
        if own[number] != theirs[number] or site.columns != other.columns:
            where = f"at site {number} ({site.parts[0].name})"
            raise MaskingRefused(f"{second.endpoint} has other weights than {session.endpoint} {where}; both must serve one model")
