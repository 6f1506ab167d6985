"""The pages of the claims: docs/proof/README.md, its pictures, and docs/proof/claims.html."""

import html
import textwrap

from bar_chart import Bar, BarChart
from page_parts import ROOT, replace_part, write_or_check
from proof.claim import NOT_HERE, NOT_REPRODUCED, REPRODUCED, Figure
from proof.run import recorded

PAGE = ROOT / "docs/proof/README.md"
HTML = ROOT / "docs/proof/claims.html"
PICTURES = ROOT / "docs/proof/pictures"
HEADINGS = "Claim", "What is claimed", "Paper", "Ours", "Wanted", "Verdict"
NOT_RUN = "not run yet"
COLUMNS = 140
COLOURS = {REPRODUCED: "#1a7f37", NOT_REPRODUCED: "#b3261e", NOT_HERE: "#5b616b", NOT_RUN: "#5b616b"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1e21; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #d5d9e0; padding: .4rem .6rem; text-align: left; vertical-align: top; }
code { font-size: 12px; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
"""


def number(value):
    """Three digits that count."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 0.001 else f"{value:.3g}"


def with_interval(record):
    low, high = record["interval"]
    interval = f" [{number(low)}, {number(high)}]" if low < high else ""
    return f"{number(record['figure'])}{interval} {record['unit']}".strip()


class Row:
    """What the pages say of a claim."""

    def __init__(self, claim):
        record = recorded(claim) or {"verdict": NOT_RUN}
        self.claim, self.record = claim, record
        self.verdict = record["verdict"]
        self.paper = number(claim.paper) if claim.paper is not None else ""
        self.ours = with_interval(record) if "figure" in record else ""
        self.wanted = claim.rule.words if claim.rule else ""
        self.reason = record.get("reason", "")
        self.command = record.get("setup", {}).get("command", claim.command.shown())

    def markdown(self):
        claim = self.claim
        name = f"[{claim.id}](claims/{claim.id}.json)" if self.verdict != NOT_RUN else claim.id
        verdict = f"**{self.verdict}**" if self.verdict == NOT_REPRODUCED else self.verdict
        verdict += f": {self.reason}" if self.reason else ""
        return f"| {name} | {claim.text} ({claim.source}) | {self.paper} | {self.ours} | {self.wanted} | {verdict} |"

    def html(self):
        claim = self.claim
        verdict = f'<b style="color:{COLOURS[self.verdict]}">{self.verdict}</b> {html.escape(self.reason)}'
        cells = [
            claim.id,
            f"{html.escape(claim.text)} <i>{html.escape(claim.source)}</i><br><code>{html.escape(self.command)}</code>",
            self.paper,
            html.escape(self.ours),
            html.escape(self.wanted),
            verdict,
        ]
        return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


class Section:
    """What the pages say of a group: its pictures by their names, and a row for each claim."""

    def __init__(self, group):
        self.group = group
        self.rows = [Row(claim) for claim in group.claims]
        drawn = [(f"{chart.prefix.lower().strip('-')}.svg", chart, picture(chart, self.rows)) for chart in group.charts]
        self.pictures = [(name, chart.title, svg) for name, chart, svg in drawn if svg]

    def markdown(self):
        return "\n".join([
            f"## {self.group.title}",
            "",
            textwrap.fill(self.group.about, COLUMNS),
            "",
            *(f"![{title}](pictures/{name})\n" for name, title, _ in self.pictures),
            f"| {' | '.join(HEADINGS)} |",
            "|---|---|---:|---:|---|---|",
            *(row.markdown() for row in self.rows),
        ])  # fmt: skip

    def html(self):
        return "\n".join([
            f"<h2>{html.escape(self.group.title)}</h2>",
            f"<p>{html.escape(self.group.about)}</p>",
            *(svg for _, _, svg in self.pictures),
            f"<table>\n<tr>{''.join(f'<th>{heading}</th>' for heading in HEADINGS)}</tr>",
            *(row.html() for row in self.rows),
            "</table>",
        ])  # fmt: skip


def picture(chart, rows):
    """The chart of the rows that have a label and a figure, as SVG; nothing if none has both."""
    shown = [row for row in rows if row.claim.id.startswith(chart.prefix) and row.claim.label and "figure" in row.record]
    if not shown:
        return None
    machines = sorted({row.record["setup"]["machine"]["processor"] for row in shown})
    dates = sorted({row.record["setup"]["date"] for row in shown})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    note = f"Lines are the intervals of the claims' files. {', '.join(machines)}, {days}."
    return BarChart(chart.title, ("Holobiont", "the paper"), [(row.claim.label, bars(row)) for row in shown], note).svg()


def bars(row):
    value, (low, high), paper = row.record["figure"], row.record["interval"], row.claim.paper
    return Bar(value, low, high, number(value)), paper and Bar(paper, paper, paper, number(paper))


def tally(sections):
    verdicts = [row.verdict for section in sections for row in section.rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in COLOURS if verdict in verdicts)
    return f"{len(verdicts)} claims: {counts}."


def document(summary, sections):
    head = f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Claims</title>\n<style>{STYLE}</style>'
    return "\n".join([head, "<h1>Claims</h1>", f"<p>{summary}</p>", *(section.html() for section in sections), "</html>", ""])


def pages(groups):
    """Texts of all files by their paths."""
    sections = [Section(group) for group in groups]
    summary = tally(sections)
    written = "\n\n".join([summary, *(section.markdown() for section in sections)])
    return {
        PAGE: replace_part(PAGE.read_text(), "claims", written, "scripts/prove --page"),
        HTML: document(summary, sections),
        **{PICTURES / name: svg for section in sections for name, _, svg in section.pictures},
    }


def write(groups, check):
    """Writes the pages, or ends if one differs from the records, or a record from its claim."""
    write_or_check(pages(groups), check, "scripts/prove --page")


def contradictions(groups):
    """Records whose verdict is not what their claim says of their figure."""
    for claim in (claim for group in groups for claim in group.claims):
        record = recorded(claim)
        if not record or record["verdict"] == NOT_HERE:
            continue
        figure = Figure(record["figure"], *record["interval"], record["runs"])
        if record["verdict"] != claim.verdict(figure) or record["rule"] != claim.rule.words:
            yield claim.id
