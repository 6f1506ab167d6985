"""A claim, its figure and its verdict."""

from collections.abc import Callable
from dataclasses import dataclass, field

from proof.commands import NotHere, Program, Tests
from proof.rules import Rule

REPRODUCED, NOT_REPRODUCED, NOT_HERE = "reproduced", "not reproduced", "not here"


@dataclass(frozen=True)
class Figure:
    """A measured value, the ends of its interval, and the number of runs or seeds that it is of."""

    value: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Claim:
    """What somebody claims, the command that shows it, and the rule that judges the command's figure.

    The id begins with the item of the papers' checklist, or with our word for the subject; the rest tells cases apart.
    """

    id: str
    text: str
    source: str
    command: Program | Tests | NotHere
    read: Callable[[str], Figure] | None = None
    unit: str = ""
    rule: Rule | None = None
    paper: float | None = None
    label: str = ""
    quick: bool = False

    def verdict(self, figure):
        if isinstance(self.command, NotHere):
            return NOT_HERE
        return REPRODUCED if self.rule.holds(figure) else NOT_REPRODUCED


@dataclass(frozen=True)
class Chart:
    """A picture of the claims with a label whose ids begin with `prefix`: our figure beside the paper's."""

    prefix: str
    title: str


@dataclass(frozen=True)
class Group:
    """Claims that stand together on the page."""

    title: str
    about: str
    claims: tuple[Claim, ...]
    charts: tuple[Chart, ...] = field(default=())
