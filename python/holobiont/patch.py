"""`attach` and `detach`: a model's frozen linear layers leave for an executor, and come back."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from .errors import (
    AlreadyAttached,
    BaseChanged,
    HolobiontError,
    LayersStayLocal,
    LocalLayerWarning,
    MaskingRefused,
    WeightsGone,
)
from .layers import Place, SharedInput, VirtLayer, is_linear, shape_of, virtual
from .masking import Evaluator, evaluator, path_of
from .name_matching import Layer, Match, canonical, match_layers
from .pool import Pool, default_pads
from .protocol import Class, Dtype, Op, Path
from .session import Session
from .verification import Checks

__all__ = ["Attached", "LocalLayer", "RemoteLayer", "attach", "detach"]

log = logging.getLogger("holobiont")

# Weights that were quantized answer within some percent; another model's answers have nothing in common.
_SAME_WEIGHTS = 0.5
_NAMED_IN_WARNING = 5
_WRAPPED = ("base_layer", "original_module")


@dataclass(frozen=True)
class RemoteLayer:
    """A layer that is evaluated by the executor."""

    name: str
    site: int
    part: int | None
    """Which of the site's layers; none if it is all of them, side by side."""


@dataclass(frozen=True)
class LocalLayer:
    """A linear layer that stays, and why; `expected` if that is as it should be."""

    name: str
    reason: str
    expected: bool = False


@dataclass(frozen=True)
class Attached:
    """What `attach` did."""

    session: Session
    path: Path
    dtype: Dtype | None
    """Of numbers on the wire; none if each call takes what holds its rows."""
    remote: tuple[RemoteLayer, ...]
    local: tuple[LocalLayer, ...]

    @property
    def masking(self) -> str:
        """How activations are protected: ``off``, ``paper``, which is obfuscation, or ``shares``."""
        return self.session.masking

    def __str__(self) -> str:
        catalog = self.session.catalog
        wire = self.dtype.name.lower() if self.dtype is not None else "bf16 where activations are, else f32"
        lines = [
            f"{len(self.remote)} linear layers of {catalog.model} ({catalog.architecture}) at {self.session.endpoint}",
            f"path {self.path.name.lower()}, {wire} on the wire, masking {self.masking}",
        ]
        lines += [f"local: {layer.name}: {layer.reason}" for layer in self.local]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Found:
    """A linear layer of the model; `places` are all the modules that hold it, by attribute."""

    name: str
    module: Any
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def attach(
    model: nn.Module,
    endpoint: str | Session,
    *,
    api_key: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    certificate_key: str | os.PathLike[str] | None = None,
    path: str | None = None,
    dtype: str | None = None,
    masking: str = "off",
    second: str | os.PathLike[str] | Session | None = None,
    pads: str | os.PathLike[str] | Pool | None = None,
    verify: str | os.PathLike[str] | Checks | None = None,
    keep: Sequence[str] | None = None,
    free: bool = False,
    strict: bool = False,
    check_weights: bool = True,
) -> Attached:
    """Replaces the frozen linear and Conv1D layers of `model` by remote ones, in place, and says which.

    Adapters stay yours: PEFT may wrap the model before or after. In a model of which no parameter is frozen (as
    ``from_pretrained`` gives it) every layer that the executor has counts as frozen; in others, layers that are trained
    stay.

    - `endpoint`: ``tls://host:port``, on the executor's own host the path of its state directory or layer socket, or a
      `Session`, which stays open after `detach` and brings its own masking mode.
    - `path`: ``"linear"`` for training and comparison, ``"fast"`` for the arithmetic of the resident engine (forward
      only; gradients take the linear path then), ``"ring"`` for exact arithmetic, which the executor has to offer. Without
      it ``"ring"`` where `masking` is ``"pads"`` or ``"shares"``, else ``"linear"``.
    - `dtype`: numbers on the wire. Without it bf16 activations, and their gradients, travel as bf16, which loses nothing
      (the answer would be rounded to it here), all others and whatever is masked as f32. ``"bf16"`` rounds those too,
      ``"f32"`` none.
    - `masking`: ``"off"``; ``"paper"``, which is obfuscation; ``"pads"``: the executor learns nothing from what it sees; or
      ``"shares"``: neither of two does (``docs/guides/privacy.md``). Answers of both have the bits of ``path="ring"``.
    - `second`: the other executor of ``"shares"``, whose operator has nothing to do with the first one's: an address, where you
      are known by the same key or certificate, or a `Session` of its own, opened with ``masking="shares"``.
    - `pads`: for ``"pads"``: the directory where ``holobiont-client pads prepare`` has made them, without it the one it takes by
      itself; or a `Pool`. Each covers one row, once; when there are no more, calls are refused.
    - `verify`: every answer is checked, and a wrong one is `WrongAnswer`: the file that ``holobiont-client checks`` made of your own
      copy of the model, or `Checks` of it. Of exact arithmetic alone, which it is then without a `path`.
    - `keep`: layers that stay here, by the end of their names (``["lm_head"]``). Without it, those whose weights are the
      embedding's (a tied head), which is here anyway; ``keep=[]`` rents these too. Trainers with a fused head (TRL's
      ``SFTTrainer``) compute with its weights and need it here.
    - `free`: drops the local weights of remote layers; `detach` cannot restore these. Weights on the meta device are
      none to begin with.
    - `strict`: raises `LayersStayLocal` instead of warning if a frozen linear layer is not in the catalog.
    - `check_weights`: compares one random row per layer with the local weights, where there are any, so that a model
      is not attached to another one's base by mistake.

    Raises a `HolobiontError`; the model is unchanged then.
    """
    if any(isinstance(module, VirtLayer) for module in model.modules()):
        raise AlreadyAttached("the model has remote layers already; call holobiont.detach(model) first")
    options = _Options(
        None if path is None else _choose(Path, path, "path"),
        None if dtype is None else _choose(Dtype, dtype, "dtype"),
        [keep] if isinstance(keep, str) else keep,
        free=free,
        strict=strict,
        check_weights=check_weights,
        checks=Checks(verify) if isinstance(verify, str | os.PathLike) else verify,
    )
    given = {"api_key": api_key, "ca": ca, "certificate": certificate, "certificate_key": certificate_key}
    with contextlib.ExitStack() as opened:
        session, aside = sessions(opened, endpoint, second, pads, masking=masking, **given)
        owned = [own for own in (session, aside) if own is not None and own not in (endpoint, second, pads)]
        attached = _attach(model, session, aside, options, owned)
        opened.pop_all()
    return attached


def sessions(
    opened: contextlib.ExitStack,
    endpoint: str | os.PathLike[str] | Session,
    second: str | os.PathLike[str] | Session | None,
    pads: str | os.PathLike[str] | Pool | None,
    **options: Any,
) -> tuple[Session, Session | Pool | None]:
    """That of the executor, and what rows are hidden with. Whatever is an address, or a place, is opened, and closed with the stack."""

    def session(at: str | os.PathLike[str] | Session) -> Session:
        return at if isinstance(at, Session) else opened.enter_context(Session(at, **options))

    first = session(endpoint)
    if second is not None and pads is not None:
        raise MaskingRefused("a second executor and pads are two ways to hide rows; choose one")
    if second is not None:
        return first, session(second)
    if pads is None and first.masking != "pads":
        return first, None
    if isinstance(pads, Pool):
        return first, pads
    return first, opened.enter_context(Pool(default_pads() if pads is None else pads))


def detach(model: nn.Module) -> None:
    """Puts the local layers back, and closes what `attach` opened.

    Raises `WeightsGone`, and changes nothing, if weights were freed or never there.
    """
    found = [f for f in _linear_layers(model) if isinstance(f.module, VirtLayer)]
    gone = [f.name for f in found if f.module.holobiont.original is None]
    if gone:
        raise WeightsGone(f"{len(gone)} layers have no local weights ({gone[0]}, ...); load the model anew")
    for layer in found:
        virt, original = layer.module, layer.module.holobiont.original
        original.to(virt.weight.device, virt.weight.dtype).train(virt.training)
        for parent, attribute in layer.places:
            setattr(parent, attribute, original)
    for own in {id(own): own for f in found for own in f.module.holobiont.owned}.values():
        own.close()


@dataclass(frozen=True)
class _Options:
    """What `attach` was told, checked."""

    path: Path | None
    dtype: Dtype | None
    keep: Sequence[str] | None
    free: bool
    strict: bool
    check_weights: bool
    checks: Checks | None


Choice = TypeVar("Choice", bound=enum.IntEnum)


def _choose(kind: type[Choice], name: str, what: str) -> Choice:
    try:
        return kind[name.upper()]
    except KeyError:
        known = ", ".join(repr(choice.name.lower()) for choice in kind)
        raise HolobiontError(f"{what} is {known}, not {name!r}") from None


def _attach(
    model: nn.Module, session: Session, aside: Session | Pool | None, options: _Options, owned: Sequence[Session | Pool]
) -> Attached:
    """Decides everything first, then replaces. What is `owned` is closed with the attachment."""
    path = path_of(session, options.path, options.checks)
    rented = evaluator(session, path, options.dtype, aside, options.checks)
    places, local = _plan(model, session, options.keep)
    _check_paths(session, path, places.values())
    _report_local(local, options.strict)
    by_name = {found.name: found for found in _linear_layers(model)}
    if options.check_weights:
        for name, place in places.items():
            _check_weights(by_name[name], rented, place)
    shared = {place.site: _shared(rented, session, place.site) for place in places.values()}
    for name, place in places.items():
        found = by_name[name]
        keep = not options.free and found.module.weight.device.type != "meta"
        where = Place(shared[place.site], place.part, found.module if keep else None, owned)
        layer = virtual(found.module, where, _device(model))
        for parent, attribute in found.places:
            setattr(parent, attribute, layer)
    remote = tuple(RemoteLayer(name, place.site, place.part) for name, place in places.items())
    attached = Attached(session, path, options.dtype, remote, tuple(local))
    log.info("attached: %s", attached)
    return attached


# --- Which layers ----------------------------------------------------------------------------------------------------


def _linear_layers(model: nn.Module) -> list[_Found]:
    """All linear layers, without those that belong to adapters."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, _Found] = {}
    for name, module in modules.items():
        if name and is_linear(module) and not _is_adapters_own(name, modules):
            parent, _, attribute = name.rpartition(".")
            found.setdefault(id(module), _Found(name, module)).places.append((modules[parent], attribute))
    return list(found.values())


def _is_adapters_own(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether some module above wraps a layer and this one is not on the way to it."""
    words = name.split(".")
    for depth in range(1, len(words)):
        above = modules[".".join(words[:depth])]
        if any(isinstance(getattr(above, wrapped, None), nn.Module) for wrapped in _WRAPPED):
            if words[depth] not in _WRAPPED:
                return True
    return False


def _plan(
    model: nn.Module, session: Session, keep: Sequence[str] | None
) -> tuple[dict[str, Match], list[LocalLayer]]:
    """Places of the layers that leave, by name, and the layers that stay."""
    found = _linear_layers(model)
    kept = _kept(found, model, keep)
    none_is_frozen = all(parameter.requires_grad for parameter in model.parameters())
    layers = [Layer(f.name, *shape_of(f.module), has_bias=f.module.bias is not None) for f in found]
    matched = match_layers(layers, session.catalog)
    places: dict[str, Match] = {}
    local: list[LocalLayer] = []
    for layer in found:
        match = matched[layer.name]
        if layer.module.weight.requires_grad and not none_is_frozen:
            local.append(LocalLayer(layer.name, "is trained", expected=True))
        elif layer.name in kept:
            local.append(LocalLayer(layer.name, kept[layer.name], expected=True))
        elif isinstance(match, Match):
            places[layer.name] = match
        else:
            local.append(LocalLayer(layer.name, match))
    if not places:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in local[:_NAMED_IN_WARNING])
        base = f"{session.catalog.model} at {session.endpoint}"
        raise LayersStayLocal(f"no layer of the model is one of {base}: {reasons}")
    return places, local


def _kept(found: list[_Found], model: nn.Module, keep: Sequence[str] | None) -> dict[str, str]:
    """Layers that stay although they could leave, by name, and why."""
    if keep is None:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        return {f.name: "its weights are the embedding's" for f in found if id(f.module.weight) in embeddings}
    kept: dict[str, str] = {}
    for ending in keep:
        words = canonical(ending)
        named = [f.name for f in found if canonical(f.name)[-len(words) :] == words]
        if not named:
            raise HolobiontError(f"keep names {ending!r}, and no linear layer's name ends so; write it as in str(model)")
        kept.update(dict.fromkeys(named, f"keep names {ending!r}"))
    return kept


def _report_local(local: list[LocalLayer], strict: bool) -> None:
    """A frozen layer that stays is never passed over in silence."""
    unexpected = [layer for layer in local if not layer.expected]
    if not unexpected:
        return
    named = "; ".join(f"{layer.name}: {layer.reason}" for layer in unexpected[:_NAMED_IN_WARNING])
    more = f"; and {len(unexpected) - _NAMED_IN_WARNING} more" if len(unexpected) > _NAMED_IN_WARNING else ""
    message = f"{len(unexpected)} frozen linear layers stay local ({named}{more})"
    if strict:
        raise LayersStayLocal(f"{message}; with strict=False they are computed here, if their weights are here")
    warnings.warn(message, LocalLayerWarning, stacklevel=4)


def _check_paths(session: Session, path: Path, places: Iterable[Match]) -> None:
    for number in sorted({place.site for place in places}):
        site = session.catalog.sites[number]
        if not site.has_path(path):
            what = f"site {number} ({site.parts[0].name}) has no {path.name.lower()} path"
            raise HolobiontError(f"{what}; use another one")


# --- What replaces them ----------------------------------------------------------------------------------------------


def _shared(rented: Evaluator, session: Session, site: int) -> SharedInput:
    return SharedInput(rented, site, [part.rows for part in session.catalog.sites[site].parts])


def _device(model: nn.Module) -> torch.device:
    """Where adapters of layers without weights go: where the rest of the model is."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@torch.no_grad()
def _check_weights(found: _Found, rented: Evaluator, place: Match) -> None:
    """Refuses a base whose layer has nothing in common with the local one."""
    weight, bias = found.module.weight, found.module.bias
    if weight.device.type == "meta" or not weight.is_floating_point():
        return
    row = np.random.default_rng(0).standard_normal((1, shape_of(found.module)[0]), dtype=np.float32)
    x = torch.from_numpy(row).to(weight.device, weight.dtype)
    here = x @ (weight.T if isinstance(found.module, nn.Linear) else weight)
    here = (here if bias is None else here + bias).float().cpu()
    there = torch.from_numpy(rented.evaluate(place.site, place.part, Op.FORWARD, Class.PREFILL, row))
    apart = float((there - here).norm() / here.norm().clamp_min(1e-12))
    if apart > _SAME_WEIGHTS:
        why = f"{found.name} has other weights than the executor's base ({apart:.0%} apart)"
        raise BaseChanged(f"{why}; is it the same model? Pass check_weights=False to attach all the same")
