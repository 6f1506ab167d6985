"""What passes if it is tried again, for how long, and what a refusal that does not pass is called."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .errors import AuthenticationFailed, HolobiontError, MaskingRefused, SessionRefused
from .protocol import RefusalCode, Refused

__all__ = ["Backoff", "Limits", "TryLater", "refusal"]

_RETRIED = {RefusalCode.QUOTA, RefusalCode.BUSY, RefusalCode.DRAINING}


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds."""

    connect_s: float = 10.0
    """For one connection to be made."""
    answer_s: float = 120.0
    """For one call or request to be answered while the connection stands."""
    retry_s: float = 60.0
    """For retries of one call altogether: lost connections, quotas, a busy or restarting executor."""


class Backoff:
    """Waits between tries: doubling from 50 ms to 2 s, jittered, never past `retry_s` in all."""

    def __init__(self, retry_s: float) -> None:
        self.has_lost = False
        """Whether a connection was among what went wrong: it is warned of once."""
        self._until = time.monotonic() + retry_s
        self._next_s = 0.05

    def wait(self, at_least_s: float, error: HolobiontError) -> None:
        """Sleeps; raises `error` instead if time is up."""
        pause_s = max(at_least_s, self._next_s * random.uniform(0.75, 1.25))
        if time.monotonic() + pause_s > self._until:
            raise error
        time.sleep(pause_s)
        self._next_s = min(2 * self._next_s, 2.0)


class TryLater(Exception):
    """A refusal that may pass."""

    def __init__(self, after_s: float, error: HolobiontError) -> None:
        super().__init__(str(error))
        self.after_s = after_s
        self.error = error


def refusal(refused: Refused) -> Exception:
    """The exception for a control message that was refused."""
    message = f"the executor refuses ({refused.code.name.lower()}): {refused.message}"
    if refused.code in _RETRIED and refused.retry_after_ms:
        return TryLater(refused.retry_after_ms / 1000, SessionRefused(message))
    if refused.code is RefusalCode.UNAUTHENTICATED:
        return AuthenticationFailed(message)
    return MaskingRefused(message) if refused.code is RefusalCode.MASKING else SessionRefused(message)
