"""What a forked process must not share with its parent: connections, locks that a thread held, random numbers."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "renewed_in_forks"]


class Forkable(Protocol):
    """Something that can begin anew in a child process."""

    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""
        ...


_renewed: weakref.WeakSet[Forkable] = weakref.WeakSet()


def renewed_in_forks(thing: Forkable) -> None:
    """Has `thing` begin anew in every child process for as long as it lives."""
    _renewed.add(thing)


def _renew() -> None:
    for thing in list(_renewed):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)
