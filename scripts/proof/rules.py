"""When a figure bears a claim out. Each rule says in words what it asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proof.claim import Figure


@dataclass(frozen=True)
class Rule:
    words: str
    holds: Callable[["Figure"], bool]


def at_least(bound):
    return Rule(f"at least {bound:g}", lambda figure: figure.value >= bound)


def at_most(bound):
    return Rule(f"at most {bound:g}", lambda figure: figure.value <= bound)


def exactly(value):
    return Rule(f"exactly {value:g}", lambda figure: figure.low == figure.value == figure.high == value)


def within(value, share):
    """The figure is the paper's, but for a share of it."""
    return Rule(f"within {share:.0%} of {value:g}", lambda figure: abs(figure.value - value) <= share * value)


def above(bound):
    """The whole interval lies above: the sign is certain."""
    return Rule(f"whole interval above {bound:g}", lambda figure: figure.low > bound)


def half_of_the_effect(factor):
    """The sign of a factor is that of the paper's with the whole interval, and its distance from 1 at least half as large."""
    half = 1 + (factor - 1) / 2
    if factor > 1:
        return Rule(f"whole interval above 1, value at least {half:.3g}", lambda figure: figure.low > 1 and figure.value >= half)
    return Rule(f"whole interval below 1, value at most {half:.3g}", lambda figure: figure.high < 1 and figure.value <= half)
