"""What a trainer's steps cost on the wire."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from .counters import Counters
from .layers import VirtLayer

__all__ = ["TrafficCallback"]


class TrafficCallback(TrainerCallback):
    """Counts what each training step asks for, sends and receives, and how often it had to connect again.

    ``Trainer(..., callbacks=[holobiont.TrafficCallback()])`` shows the figures beside the loss: per step, as means over those
    since the last log; connections made anew as their sum. `steps` has each step's own. Evaluation is not counted.
    """

    def __init__(self) -> None:
        self.steps: list[Counters] = []
        self._before = Counters()
        self._shown = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Notes where the counters of the model's sessions stand."""
        self._before = _counted(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Keeps what the step took."""
        self.steps.append(_counted(model) - self._before)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Adds the figures to what is printed, and to the trainer's history."""
        new, self._shown = self.steps[self._shown :], len(self.steps)
        if not new:
            return
        total = sum(new, Counters())
        figures = {
            "calls": total.calls / len(new),
            "bytes_out": total.bytes_out / len(new),
            "bytes_in": total.bytes_in / len(new),
            "reconnects": total.reconnects,
        }
        logs.update(figures)
        state.log_history[-1].update(figures)


def _counted(model: nn.Module) -> Counters:
    """What all sessions of a model have used."""
    remote = (module for module in model.modules() if isinstance(module, VirtLayer))
    sessions = {layer.holobiont.shared.evaluator.session for layer in remote}
    return sum((session.counters for session in sessions), Counters())
