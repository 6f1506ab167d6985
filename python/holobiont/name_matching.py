"""Which module of a model is which layer of the catalog.

Names differ at the front: PEFT puts ``base_model.model.`` before them, files leave out ``transformer.``. So the names with
the longest common end are taken to mean the same, if every number in both lies in that end (layer 3 is never layer 13),
if the shapes agree, and if no other module fits as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .protocol import Catalog

__all__ = ["Layer", "Match", "canonical", "match_layers"]

# Attributes in which wrappers keep the layer that they wrap.
_WRAPPED = {"base_layer", "original_module"}

# What transformers calls the one layer that is several in the catalog, side by side (Phi-3).
_FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model: its qualified name and shape."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool


@dataclass(frozen=True)
class Match:
    """Its place in the catalog: a part of a site, or all of it if `part` is none."""

    site: int
    part: int | None


def canonical(name: str) -> tuple[str, ...]:
    """A qualified name's components, without those of wrappers."""
    return tuple(word for word in name.split(".") if word not in _WRAPPED)


def match_layers(layers: Sequence[Layer], catalog: Catalog) -> dict[str, Match | str]:
    """For each layer, by name, its place in the catalog or why it has none."""
    parts = _by_tail(catalog)
    found: dict[str, Match | str] = {}
    claims: dict[Match, list[tuple[int, str]]] = {}
    for layer in layers:
        result = _best(layer, parts, catalog)
        if isinstance(result, str):
            found[layer.name] = result
        else:
            claims.setdefault(result[1], []).append((result[0], layer.name))
    for place, rivals in claims.items():
        found.update(_settle(place, rivals, catalog))
    return found


def _numbers(name: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word in name if word.isdigit())


Tail = tuple[str, tuple[str, ...]]


def _by_tail(catalog: Catalog) -> dict[Tail, list[tuple[tuple[str, ...], Match]]]:
    """The catalog's layers by last word and numbers: only those can mean the same."""
    tails: dict[Tail, list[tuple[tuple[str, ...], Match]]] = {}
    for number, site in enumerate(catalog.sites):
        for index, part in enumerate(site.parts):
            name = canonical(part.name)
            tails.setdefault((name[-1], _numbers(name)), []).append((name, Match(number, index)))
        first = canonical(site.parts[0].name)
        fused = _FUSED.get(tuple(canonical(part.name)[-1] for part in site.parts))
        if fused is not None:
            name = (*first[:-1], fused)
            tails.setdefault((fused, _numbers(name)), []).append((name, Match(number, None)))
    return tails


def _best(
    layer: Layer, parts: dict[Tail, list[tuple[tuple[str, ...], Match]]], catalog: Catalog
) -> tuple[int, Match] | str:
    """Length of the common end and the one place it belongs to, or why there is none."""
    name = canonical(layer.name)
    numbers = _numbers(name)
    scored = []
    for other, place in parts.get((name[-1], numbers), []):
        length = _common_end(name, other)
        if _numbers(name[len(name) - length :]) == numbers:
            scored.append((length, place))
    if not scored:
        return "not in the catalog"
    longest = max(length for length, _ in scored)
    places = [place for length, place in scored if length == longest]
    if len(places) > 1:
        return "several layers of the catalog have names as like"
    return _misfit(layer, places[0], catalog) or (longest, places[0])


def _common_end(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    length = 0
    for x, y in zip(reversed(a), reversed(b)):
        if x != y:
            break
        length += 1
    return length


def _misfit(layer: Layer, place: Match, catalog: Catalog) -> str | None:
    """How the layer's shape differs from the catalog's, if it does."""
    site = catalog.sites[place.site]
    outputs = site.outputs(place.part)
    parts = site.parts if place.part is None else (site.parts[place.part],)
    if (layer.inputs, layer.outputs) != (site.columns, outputs):
        return f"has {layer.inputs} inputs and {layer.outputs} outputs; the catalog has {site.columns} and {outputs}"
    if layer.has_bias != any(part.has_bias for part in parts):
        return "has a bias, the catalog's has none" if layer.has_bias else "has no bias, the catalog's has one"
    return None


def _settle(place: Match, rivals: list[tuple[int, str]], catalog: Catalog) -> dict[str, Match | str]:
    """Gives a place to the module whose name is most alike; to none if that is not one."""
    longest = max(length for length, _ in rivals)
    winners = [name for length, name in rivals if length == longest]
    named = catalog.sites[place.site].parts[place.part or 0].name
    settled: dict[str, Match | str] = {name: f"another module is more like {named}" for _, name in rivals}
    if len(winners) == 1:
        settled[winners[0]] = place
    else:
        settled.update(dict.fromkeys(winners, f"several modules are as like {named}"))
    return settled
