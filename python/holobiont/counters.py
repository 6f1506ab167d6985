"""What a session sent and received, counted where it is paid: on this machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(frozen=True)
class Counters:
    """Calls, their bytes in both directions, and connections that were made anew. What was repeated counts again."""

    calls: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    reconnects: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.calls + other.calls,
            self.bytes_out + other.bytes_out,
            self.bytes_in + other.bytes_in,
            self.reconnects + other.reconnects,
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.calls - earlier.calls,
            self.bytes_out - earlier.bytes_out,
            self.bytes_in - earlier.bytes_in,
            self.reconnects - earlier.reconnects,
        )
