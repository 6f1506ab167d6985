"""Exact arithmetic: rows as whole numbers modulo 2^48 or 2^64, by any route. The same bits whatever an executor sees.

The bias of a site is no ring element: it is asked for once, by a row of zeros through the linear path, which tells nobody
anything, and added here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .errors import CallRefused, MaskingRefused
from .fixed_point import Room, Whole, from_whole, pack, room_of, to_whole, unpack
from .protocol import Class, Dtype, Op, Path, Ring, Site
from .session import Ask, Session
from .wire_dtype import Rows

__all__ = ["Bare", "Checker", "Exact", "Route", "offer_of", "offers"]


class Route(Protocol):
    """How rows of whole numbers get through a site."""

    @property
    def session(self) -> Session:
        """With whom the base is shared."""
        ...

    def call(self, ask: Ask, room: Room, rows: Whole) -> Whole:
        """``[rows, inputs]`` to ``[rows, outputs]``, where rows travel as `room` says."""
        ...


@dataclass(frozen=True)
class Bare:
    """Rows as they are."""

    session: Session

    def call(self, ask: Ask, room: Room, rows: Whole) -> Whole:
        return unpack(self.session.ask(ask, pack(rows, room)), room)


def offer_of(site: Site) -> Ring | None:
    """What a site says of its integers, if rows may have bits enough both ways."""
    is_usable = site.has_ring and all(room_of(site, op) is not None for op in (Op.FORWARD, Op.BACKWARD))
    return site.ring if is_usable else None


def offers(session: Session) -> list[Ring]:
    """What all sites of a base say. Refuses one that has a site without."""
    found = []
    for number, site in enumerate(session.catalog.sites):
        offer = offer_of(site)
        if offer is None:
            what = f"site {number} ({site.parts[0].name}) of {session.endpoint} has no ring path"
            raise MaskingRefused(f"{what}; its operator switches exact arithmetic on with --layer-exact")
        found.append(offer)
    return found


class Checker(Protocol):
    """Whoever can tell whether answers are true."""

    def check(self, session: Session, ask: Ask, rows: Whole, answer: Whole) -> None:
        """Raises `WrongAnswer` if one is not."""
        ...

    def check_bias(self, session: Session, site: int, bias: npt.NDArray[np.float32]) -> None:
        """The same for what a site adds."""
        ...


class Exact:
    """Exact arithmetic over a route, forward and backward; with `checks`, of answers that are true."""

    def __init__(self, route: Route, checks: Checker | None = None) -> None:
        self.session = route.session
        self._route = route
        self._checks = checks
        self._offers = offers(route.session)
        self._biases: dict[int, npt.NDArray[np.float32]] = {}

    def evaluate(self, site: int, part: int | None, op: Op, urgency: Class, rows: Rows, exact: Dtype = Dtype.F32) -> Rows:
        """Whatever held the rows: whole numbers travel with all their bits."""
        self.session.check_rows(site, part, op, rows)
        offer, room = self._offers[site], room_of(self.session.catalog.sites[site], op)
        assert room is not None, "an offer has room both ways"
        if not np.isfinite(rows).all():
            row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise CallRefused(f"row {row} for site {site} has a number that is infinite or none; the ring has no such numbers")
        whole, exponents = to_whole(rows, room.bits)
        ring = Op.BACKWARD if op is Op.BACKWARD else Op.FORWARD_NO_BIAS
        ask = Ask(site, part, ring, Path.RING, urgency)
        answer = self._route.call(ask, room, whole)
        if self._checks is not None:
            self._checks.check(self.session, ask, whole, answer)
        out = from_whole(answer, exponents + offer.weight_exponent)
        if op is Op.FORWARD and (bias := self._bias(site, part, urgency)) is not None:
            out += bias
        return out

    def _bias(self, number: int, part: int | None, urgency: Class) -> npt.NDArray[np.float32] | None:
        """What the linear path adds to the answers of a site, or of one of its parts."""
        site = self.session.catalog.sites[number]
        if not any(layer.has_bias for layer in site.parts):
            return None
        if number not in self._biases:
            ask = Ask(number, None, Op.FORWARD, Path.LINEAR, urgency)
            bias = self.session.ask(ask, np.zeros((1, site.columns), np.float32))[0]
            if self._checks is not None:
                self._checks.check_bias(self.session, number, bias)
            self._biases[number] = bias
        before = 0 if part is None else site.outputs_before(part)
        return self._biases[number][before : before + site.outputs(part)]
