"""Rent the frozen layers of a language model; keep adapter, KV cache and optimizer on your own machine.

::

    import holobiont

    model = holobiont.model("tls://gpu-host:7443", api_key="...", ca="ca.pem")    # never held here
    holobiont.attach(loaded, "tls://gpu-host:7443", api_key="...", ca="ca.pem")   # loaded by you

# Layout

- `patch`: `attach` and `detach`, for any Hugging Face model
- `load`: `model` and `tokenizer`, from an endpoint alone; `gguf_file` and `safetensors_folder` read what it gives out
- `training`: what a trainer's steps cost on the wire
- `layers`: the modules that take the place of frozen layers, and what autograd makes of them; `placeholder`: what stands
  where their weights were
- `name_matching`: which module is which layer of the executor's catalog
- `masking`: what is done to activations before they leave; `modular`: exact arithmetic, `fixed_point`: rows as whole
  numbers; `secret_sharing`: two executors that do not collude, `seeded_rows`: their pads, `distinct`: that they stay two;
  `one_time_pads`: one executor, and pads from a disk, `pool`: each of them once; `verification`: whether answers are true
- `client_weights`: everything of a model but its linear weights
- `session`: calls and reconnection; `retries`, `counters`; `connection`: one ZeroMQ connection; `tls_proxy`: TLS for it;
  `fork_safety`: what child processes begin anew
- `protocol`, `wire`, `wire_dtype`: the bytes

What needs torch (the first three lines and `layers`) is imported when first used: protocol clients do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client_weights import skeleton
from .counters import Counters
from .errors import (
    AlreadyAttached,
    AuthenticationFailed,
    BaseChanged,
    CallRefused,
    ConnectionLost,
    EndpointError,
    HolobiontError,
    LayersStayLocal,
    LocalLayerWarning,
    MaskingRefused,
    ProtocolError,
    QuotaExceeded,
    RemoteWeights,
    SessionRefused,
    TimedOut,
    UnsupportedModel,
    UntrustedExecutor,
    WeightsGone,
    WrongAnswer,
)
from .pool import Pool
from .protocol import Class, Dtype, Op, Path
from .retries import Limits
from .session import Session
from .verification import Checks

if TYPE_CHECKING:
    from .layers import VirtConv1D, VirtLayer, VirtLinear, traffic
    from .load import model, tokenizer
    from .patch import Attached, attach, detach
    from .training import TrafficCallback

__version__ = "0.1.0"

__all__ = [
    "AlreadyAttached",
    "Attached",
    "AuthenticationFailed",
    "BaseChanged",
    "CallRefused",
    "Checks",
    "Class",
    "ConnectionLost",
    "Counters",
    "Dtype",
    "EndpointError",
    "HolobiontError",
    "LayersStayLocal",
    "Limits",
    "LocalLayerWarning",
    "MaskingRefused",
    "Op",
    "Path",
    "Pool",
    "ProtocolError",
    "QuotaExceeded",
    "RemoteWeights",
    "Session",
    "SessionRefused",
    "TimedOut",
    "TrafficCallback",
    "UnsupportedModel",
    "UntrustedExecutor",
    "VirtConv1D",
    "VirtLayer",
    "VirtLinear",
    "WeightsGone",
    "WrongAnswer",
    "attach",
    "detach",
    "model",
    "skeleton",
    "tokenizer",
    "traffic",
]

_NEED_TORCH = {
    "Attached": "patch",
    "attach": "patch",
    "detach": "patch",
    "model": "load",
    "tokenizer": "load",
    "VirtConv1D": "layers",
    "VirtLayer": "layers",
    "VirtLinear": "layers",
    "traffic": "layers",
    "TrafficCallback": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'holobiont' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f".{_NEED_TORCH[name]}", __name__)
    except ModuleNotFoundError as error:
        raise ImportError(f"holobiont.{name} needs {error.name}; pip install 'holobiont[torch]'") from error
    return getattr(module, name)
