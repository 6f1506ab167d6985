"""Bar charts as SVG: two bars for each row, with the interval of each. Standard library only."""

import html
from dataclasses import dataclass

WIDTH, LABEL, BAR, GAP, TOP = 760, 170, 16, 18, 64
COLOURS = "#2a78d6", "#8a8f98"


@dataclass(frozen=True)
class Bar:
    """A value with the ends of its interval, and the text behind it."""

    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """Rows of a label and the bars of both names; a row may lack its second bar."""

    title: str
    names: tuple[str, str]
    rows: list[tuple[str, tuple[Bar, Bar | None]]]
    note: str

    def svg(self):
        height = TOP + len(self.rows) * (2 * BAR + GAP) + 30
        title, note = html.escape(self.title), html.escape(self.note)
        legend = [
            f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="47" fill="#1c1e21">{html.escape(name)}</text>'
            for x, colour, name in zip((12, 112), COLOURS, self.names)
        ]
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            ' font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="24" font-size="16" font-weight="600" fill="#1c1e21">{title}</text>',
            *legend,
            *self._rows(),
            f'<text x="12" y="{height - 12}" font-size="12" fill="#5b616b">{note}</text>',
            "</svg>",
            "",
        ]
        return "\n".join(lines)

    def _rows(self):
        bars = [bar for _, pair in self.rows for bar in pair if bar]
        scale = (WIDTH - LABEL - 150) / max(bar.high for bar in bars)
        for row, (label, pair) in enumerate(self.rows):
            top = TOP + row * (2 * BAR + GAP)
            yield f'<text x="{LABEL - 10}" y="{top + BAR + 4}" text-anchor="end" fill="#1c1e21">{html.escape(label)}</text>'
            for index, (bar, colour) in enumerate(zip(pair, COLOURS)):
                if bar:
                    yield from _bar(bar, top + index * BAR, scale, colour)


def _bar(bar, y, scale, colour):
    middle = y + (BAR - 2) / 2
    yield f'<rect x="{LABEL}" y="{y}" width="{bar.value * scale:.1f}" height="{BAR - 2}" fill="{colour}"/>'
    if bar.low < bar.high:
        yield (
            f'<line x1="{LABEL + bar.low * scale:.1f}" x2="{LABEL + bar.high * scale:.1f}" y1="{middle:g}" y2="{middle:g}"'
            ' stroke="#1c1e21" stroke-width="1"/>'
        )
    yield f'<text x="{LABEL + bar.high * scale + 6:.1f}" y="{y + BAR - 4}" fill="#1c1e21">{html.escape(bar.text)}</text>'
