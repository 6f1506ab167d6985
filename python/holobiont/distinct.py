"""Two sessions that must never meet in one executor."""

from __future__ import annotations

from .errors import MaskingRefused

__all__ = ["Apart"]


class Apart:
    """Which executors the sessions are at. What an executor says of itself tells mistakes, not malice."""

    def __init__(self) -> None:
        self._instances: dict[int, int] = {}

    def enter(self, session: object, endpoint: str, instance: int) -> None:
        """`session` goes on with the executor `instance`; refused if another session is there."""
        self._instances[id(session)] = instance
        if list(self._instances.values()).count(instance) > 1:
            why = "the same process answers at both addresses, and would see rows and the pads that cover them"
            raise MaskingRefused(f"{endpoint}: {why}; rent from two operators")
