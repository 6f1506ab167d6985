"""VirtLayer: a frozen linear layer that is evaluated elsewhere (Symbiosis, section 3.2).

It takes the place of an ``nn.Linear`` or transformers' ``Conv1D``, has their attributes and signature, and passes
gradients on: backward is one more call, ``g W``, for which neither side saves anything. Layers that share their input
(q, k and v; gate and up) are asked for together: the first of them that sees an input fetches the answers of all.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .errors import CallRefused, RemoteWeights
from .masking import Evaluator
from .placeholder import placeholder, unpicklable
from .pool import Pool
from .protocol import Class, Dtype, Op
from .session import Session
from .wire_dtype import Rows

Conv1D: Any
try:
    from transformers.pytorch_utils import Conv1D
except ImportError:  # without transformers no model has one
    Conv1D = None

__all__ = [
    "Place",
    "SharedInput",
    "VirtConv1D",
    "VirtLayer",
    "VirtLinear",
    "is_linear",
    "shape_of",
    "traffic",
    "virtual",
]

# As many rows as a drafted step or a few parallel answers have; a prompt has more.
_MAX_DECODE_ROWS = 4

_urgency: contextvars.ContextVar[Class | None] = contextvars.ContextVar("holobiont_traffic", default=None)


@contextlib.contextmanager
def traffic(urgency: Class | str) -> Iterator[None]:
    """Says what the calls made inside are for: ``"decode"``, ``"verify"``, ``"prefill"`` or ``"training"``.

    Without it, calls are training where gradients are recorded, else decode up to four rows and prefill beyond.
    """
    token = _urgency.set(Class[urgency.upper()] if isinstance(urgency, str) else Class(urgency))
    try:
        yield
    finally:
        _urgency.reset(token)


def _urgency_of(rows: int) -> Class:
    said = _urgency.get()
    if said is not None:
        return said
    if torch.is_grad_enabled():
        return Class.TRAINING
    return Class.DECODE if rows <= _MAX_DECODE_ROWS else Class.PREFILL


# --- Calls that autograd knows ---------------------------------------------------------------------------------------


class _Call(torch.autograd.Function):
    """A site's answer, split into `widths` along the last dimension. Saves nothing but the shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: _Ask, widths: list[int]) -> tuple[Tensor, ...]:
        ctx.ask, ctx.widths, ctx.shape, ctx.like = ask, widths, x.shape, x.new_empty(0)
        ctx.set_materialize_grads(False)
        answer = ask(x, ask.op, ask.urgency)
        return tuple(part.contiguous() for part in answer.split(widths, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        if all(g is None for g in grads) or not ctx.needs_input_grad[0]:
            return None, None, None
        rows = ctx.shape[:-1]
        parts = [ctx.like.new_zeros(*rows, width) if g is None else g for g, width in zip(grads, ctx.widths)]
        answer = ctx.ask(torch.cat(parts, dim=-1), Op.BACKWARD, Class.TRAINING)
        return answer.to(ctx.like.dtype), None, None


class _Ask:
    """A site, or one part of it, as a function of tensors.

    What a call is for is decided before autograd takes over: it computes forward with gradients switched off, and
    backward in threads that know nothing of a caller's `traffic`.
    """

    def __init__(self, evaluator: Evaluator, site: int, part: int | None, op: Op, x: Tensor) -> None:
        self.op = op
        self.urgency = _urgency_of(x.numel() // x.shape[-1])
        self._evaluator, self._site, self._part = evaluator, site, part

    def __call__(self, x: Tensor, op: Op, urgency: Class) -> Tensor:
        rows: Rows = x.detach().reshape(-1, x.shape[-1]).to("cpu", torch.float32).contiguous().numpy()
        exact = Dtype.BF16 if x.dtype is torch.bfloat16 else Dtype.F32
        answer = self._evaluator.evaluate(self._site, self._part, op, urgency, rows, exact)
        return torch.from_numpy(answer).reshape(*x.shape[:-1], answer.shape[1]).to(x.device, x.dtype)


class SharedInput:
    """The parts of a site that are asked for together. The other parts' answers wait here until they are taken."""

    def __init__(self, evaluator: Evaluator, site: int, widths: list[int]) -> None:
        self.evaluator = evaluator
        self.site = site
        self.widths = widths
        self.layers: dict[int | None, weakref.ref[nn.Module]] = {}
        self._seen = threading.local()

    def width(self, part: int | None) -> int:
        """Outputs of a part, or of all of them side by side."""
        return sum(self.widths) if part is None else self.widths[part]

    def answer(self, part: int | None, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What `part` makes of `x`, cast to `dtype`."""
        if part is None or len(self.layers) < 2 or len(self.layers) < len(self.widths) or self._any_bias_is_trained():
            return self._one(part, Op.FORWARD, x.to(dtype))
        key = _key(x, dtype)
        waiting: dict[int, Tensor] = self._waiting(x, key)
        if part not in waiting:
            rows = x.to(dtype)
            ask = _Ask(self.evaluator, self.site, None, Op.FORWARD, rows)
            waiting = dict(enumerate(_Call.apply(rows, ask, self.widths)))
            self._seen.key, self._seen.waiting = key, waiting
        return waiting.pop(part)

    def without_bias(self, part: int | None, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What `part` makes of `x`, cast to `dtype`, less the bias."""
        return self._one(part, Op.FORWARD_NO_BIAS, x.to(dtype))

    def _one(self, part: int | None, op: Op, x: Tensor) -> Tensor:
        ask = _Ask(self.evaluator, self.site, part, op, x)
        answer: Tensor = _Call.apply(x, ask, [self.width(part)])[0]
        return answer

    def _waiting(self, x: Tensor, key: tuple[Any, ...]) -> dict[int, Tensor]:
        """Answers of this very input that have not been taken."""
        seen = getattr(self._seen, "key", None)
        if seen is None or seen[0]() is not x or seen[1:] != key[1:]:
            return {}
        waiting: dict[int, Tensor] = self._seen.waiting
        return waiting

    def _any_bias_is_trained(self) -> bool:
        return any(_trains_bias(layer()) for layer in self.layers.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return self  # a copied model rents the same layers


def _key(x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """The same tensor, not changed since, cast to the same type, under the same rules for gradients.

    The tensor before the cast: autocast makes each layer a copy of its own.
    """
    version = None if x.is_inference() else x._version
    return weakref.ref(x), version, dtype, torch.is_grad_enabled(), x.requires_grad, _urgency.get()


def _trains_bias(layer: nn.Module | None) -> bool:
    bias = getattr(layer, "bias", None)
    return bias is not None and bool(bias.requires_grad)


# --- Modules ----------------------------------------------------------------------------------------------------------


class Place:
    """Where a layer is evaluated, and what it was before."""

    def __init__(
        self, shared: SharedInput, part: int | None, original: nn.Module | None, owned: Sequence[Session | Pool] = ()
    ) -> None:
        self.shared = shared
        self.part = part
        self.original = original
        """The local layer, for `detach`; none if its weights were freed."""
        self.owned = owned
        """What is closed with the attachment."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable()


class VirtLayer(nn.Module):
    """What `VirtLinear` and `VirtConv1D` share: a forward that asks the executor, and weights that are not there.

    `weight` has shape, type and device of the real one: code that looks at these works, code that computes with it raises
    `RemoteWeights`. It is not part of a state dict, and must stay frozen.
    """

    holobiont: Place
    weight: nn.Parameter
    bias: nn.Parameter | None

    def _become(self, layer: Any, place: Place, device: torch.device) -> None:
        """Takes the place of `layer`; on `device`, if that was nowhere."""
        weight, bias = layer.weight, layer.bias
        object.__setattr__(self, "holobiont", place)
        device = device if weight.device.type == "meta" else weight.device
        self.weight = placeholder(weight.shape, weight.dtype, device)
        if bias is None or bias.device.type == "meta":
            self.register_parameter("bias", None)
        else:  # small, and trained by some adapters
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self._ask(x)
        return answer

    @torch.compiler.disable
    def _ask(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            raise RemoteWeights("the weights of a remote layer cannot be trained; freeze them, or leave the layer local")
        if not x.is_floating_point():
            raise CallRefused(f"a remote layer takes real numbers, not {x.dtype}; cast the rows, or pass .real and .imag")
        shared, part, device = self.holobiont.shared, self.holobiont.part, x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], shared.width(part), dtype=dtype)
        if self.bias is not None and self.bias.requires_grad:
            return shared.without_bias(part, x, dtype) + self.bias
        return shared.answer(part, x, dtype)

    def extra_repr(self) -> str:
        shared = self.holobiont.shared
        return f"{super().extra_repr()}, site={shared.site}, part={self.holobiont.part}".lstrip(", ")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "weight", None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict = {key: value for key, value in state_dict.items() if key != prefix + "weight"}
        strict, missing = args[1], args[2]
        super()._load_from_state_dict(state_dict, prefix, *args)
        if strict and prefix + "weight" in missing:
            missing.remove(prefix + "weight")


class VirtLinear(VirtLayer, nn.Linear):
    """An ``nn.Linear`` that is evaluated by an executor."""

    def __init__(self, layer: nn.Linear, place: Place, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._become(layer, place, device)


if Conv1D is None:
    VirtConv1D: Any = None
else:

    class VirtConv1D(VirtLayer, Conv1D):  # type: ignore[no-redef,misc]
        """A transformers ``Conv1D`` that is evaluated by an executor."""

        def __init__(self, layer: Any, place: Place, device: torch.device) -> None:
            nn.Module.__init__(self)
            self.nf, self.nx = layer.nf, layer.nx
            self._become(layer, place, device)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that can be evaluated elsewhere."""
    return isinstance(module, nn.Linear) or Conv1D is not None and isinstance(module, Conv1D)


def shape_of(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = module.weight.shape
    return inputs, outputs  # Conv1D keeps its weights transposed


def virtual(module: Any, place: Place, device: torch.device) -> VirtLayer:
    """The layer that takes the place of `module`; on `device`, if that is on the meta device."""
    layer: VirtLayer = (VirtLinear if isinstance(module, nn.Linear) else VirtConv1D)(module, place, device)
    place.shared.layers[place.part] = weakref.ref(layer)
    return layer
