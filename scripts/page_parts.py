"""Parts of pages that scripts write: what stands between two marks, and files that must equal what would be written."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLOSING = "<!-- end of what is written -->"


def replace_part(page, name, text, script):
    """The page with `text` between the marks of the part `name`, which `script` writes."""
    opening = f"<!-- written by {script}: {name} -->\n"
    before, found, rest = page.partition(opening)
    _, closed, after = rest.partition(CLOSING)
    if not (found and closed):
        sys.exit(f"{script}: no page has the marks of {name}")
    return f"{before}{opening}{text}\n{CLOSING}{after}"


def write_or_check(texts, check, script):
    """Writes the files, or ends with their names if `check` finds one that differs from its text."""
    stale = []
    for path, text in texts.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"{script.partition(' ')[0]}: {', '.join(stale)} differs from its data; run {script} and commit what it writes")
