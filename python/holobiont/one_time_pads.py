"""One executor, and pads whose effects this client's side has computed beforehand (``holobiont-client pads prepare``).

A row goes out as ``x + r``, with ``r`` uniform and used once; ``r W`` is in a pool (`holobiont.pool`) and is taken out of the
answer. Every attempt at a call takes pads that no other took; an empty pool is an error, never passed by.
"""

from __future__ import annotations

import numpy as np

from .errors import MaskingRefused
from .fixed_point import Room, Whole, less, pack, room_of, unpack
from .modular import offers
from .pool import Pad, Pool, Shape, hash_of
from .protocol import Op, Site
from .session import Ask, Session

__all__ = ["Padded"]


class Padded:
    """The route over one executor, with pads of a pool."""

    def __init__(self, session: Session, pool: Pool) -> None:
        pool.expect(hash_of(b"".join(offer.commitment for offer in offers(session))))
        if [_shape(site) for site in session.catalog.sites] != pool.shapes:
            raise MaskingRefused(f"the pads in {pool.path} are of other weights than those of {session.endpoint}")
        self.session = session
        self._pool = pool

    def call(self, ask: Ask, room: Room, rows: Whole) -> Whole:
        if ask.part is not None and ask.op is Op.BACKWARD:
            # A pad's effect is what all parts make of it together: gradients of one go with zeros for the others.
            rows = self._widened(ask, rows)
            ask = Ask(ask.site, None, ask.op, ask.path, ask.urgency)
        inputs, outputs = self.session.numbers(ask)
        step = self.session.rows_at_once(max(self.session.widths(ask)))
        out: Whole = np.empty((len(rows), outputs), np.uint64)
        for start in range(0, len(rows), step):
            backoff = self.session.backoff()
            while True:
                piece = rows[start : start + step]
                pads = self._pool.take(ask.site, ask.op is Op.BACKWARD, len(piece))
                masked = _numbers(pads, inputs, room)
                masked += piece
                answer = self.session.attempt(ask, len(piece), pack(masked, room).data.cast("B"), backoff)
                if answer is not None:
                    break
            out[start : start + step] = less(unpack(answer, room), self._effects(ask, room, pads), room)
        return out

    def _widened(self, ask: Ask, rows: Whole) -> Whole:
        site = self.session.catalog.sites[ask.site]
        assert ask.part is not None, "only gradients of a part are"
        before = site.outputs_before(ask.part)
        wide: Whole = np.zeros((len(rows), site.outputs(None)), np.uint64)
        wide[:, before : before + rows.shape[1]] = rows
        return wide

    def _effects(self, ask: Ask, room: Room, pads: list[Pad]) -> Whole:
        """What the site, or a part of it, makes of pads."""
        effects = unpack(np.stack([pad.effect for pad in pads]), room)
        if ask.part is None:
            return effects
        site = self.session.catalog.sites[ask.site]
        before = site.outputs_before(ask.part)
        return effects[:, before : before + site.outputs(ask.part)]


def _numbers(pads: list[Pad], width: int, room: Room) -> Whole:
    return np.concatenate([pad.draw.rows(1, width, room) for pad in pads])


def _shape(site: Site) -> Shape:
    """That of a site as a pool has it."""
    rooms = [room_of(site, op) for op in (Op.FORWARD, Op.BACKWARD)]
    forward, backward = (0 if room is None else room.number_bytes for room in rooms)
    return Shape(site.columns, site.outputs(None), forward, backward)
