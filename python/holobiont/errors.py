"""What can go wrong, one class each. Every message says the cause and the next step."""

from __future__ import annotations

__all__ = [
    "AlreadyAttached",
    "AuthenticationFailed",
    "BaseChanged",
    "CallRefused",
    "ConnectionLost",
    "EndpointError",
    "HolobiontError",
    "LayersStayLocal",
    "LocalLayerWarning",
    "MaskingRefused",
    "ProtocolError",
    "QuotaExceeded",
    "RemoteWeights",
    "SessionRefused",
    "TimedOut",
    "UnsupportedModel",
    "UntrustedExecutor",
    "WeightsGone",
    "WrongAnswer",
]


class HolobiontError(Exception):
    """Whatever this package raises by itself."""


class EndpointError(HolobiontError, ValueError):
    """The address is none, or asks for something that is refused (unencrypted TCP)."""


class ProtocolError(HolobiontError):
    """The peer sent bytes that are not the layer protocol, or a value does not fit it."""


class ConnectionLost(HolobiontError, ConnectionError):
    """There is no connection, and trying again for as long as allowed did not help."""


class TimedOut(HolobiontError, TimeoutError):
    """The executor is connected but did not answer in time."""


class AuthenticationFailed(HolobiontError):
    """The executor does not know the key or the client certificate."""


class UntrustedExecutor(HolobiontError):
    """The executor's certificate is not what `ca` and the host name call for. Never retried."""


class SessionRefused(HolobiontError):
    """The executor does not open a session, or refuses a control message."""


class CallRefused(HolobiontError):
    """The executor refuses a call in a way that repeating it would not change."""


class QuotaExceeded(CallRefused):
    """The tenant's quota stayed used up for as long as retries were allowed."""


class MaskingRefused(HolobiontError):
    """The masking mode cannot be kept; nothing was sent without it."""


class WrongAnswer(HolobiontError):
    """The executor's answer is not what its weights make of the row: a fault, or a lie."""


class BaseChanged(HolobiontError):
    """After a reconnection the executor serves another base."""


class LayersStayLocal(HolobiontError):
    """`strict=True`, and some frozen linear layer has no counterpart at the executor. Nothing was changed."""


class AlreadyAttached(HolobiontError):
    """The model has remote layers already."""


class WeightsGone(HolobiontError):
    """`detach` cannot restore layers whose weights were freed."""


class RemoteWeights(HolobiontError):
    """Something asked for the weights of a layer that is evaluated elsewhere."""


class UnsupportedModel(HolobiontError):
    """The base cannot be built from what the executor gives out of it."""


class LocalLayerWarning(UserWarning):
    """A frozen linear layer is not in the executor's catalog and is computed here."""
