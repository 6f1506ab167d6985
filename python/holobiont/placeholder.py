"""What stands where a remote layer's weights were: their shape, type and device, and nothing to compute with.

Tools look at weights (PEFT reads type and device, transformers counts them), and that works. Whatever would compute with them
(a fused head, merging, resizing, initializations that read weights) raises `RemoteWeights` and says what to do instead: a
number in their place would be taken for an answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import RemoteWeights

__all__ = ["placeholder", "unpicklable"]

_INSTEAD = "merge, resize or quantize a model that is not attached, or attach with keep=[...] to leave that layer here"
# What moves a tensor or hands it on, without a look at its numbers.
_HARMLESS = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._to_copy.default,
}


class _Absent(Tensor):
    """A tensor without storage. Every operation on it comes through `__torch_dispatch__`."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Absent:
        made: _Absent = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            raise RemoteWeights(f"{func.overloadpacket} needs weights that are at the executor; {_INSTEAD}")
        given, options = args[0], kwargs or {}
        return cls(given.shape, options.get("dtype") or given.dtype, options.get("device") or given.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<weights at the executor, {list(self.shape)}, {self.dtype}, {self.device}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = placeholder(self.shape, self.dtype, self.device, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable()


def placeholder(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, *, requires_grad: bool = False
) -> nn.Parameter:
    """A parameter that looks like the weights that are not here."""
    return nn.Parameter(_Absent(shape, dtype, device), requires_grad=requires_grad)


def unpicklable() -> RemoteWeights:
    """Why a remote layer cannot be pickled."""
    why = "a remote layer cannot be pickled: its weights and its connection are not part of it"
    return RemoteWeights(f"{why}; save the adapter (save_pretrained) or the state_dict, and attach where it is loaded")
