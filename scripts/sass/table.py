"""The committed table of machine code: a line for each kernel and architecture, and the rules that no update may break."""

import re

from sass.figures import Figures

HEAD = """\
# Machine code of the kernels, as scripts/cuda-sass reads it. Written by scripts/cuda-sass --update; --check compares.
#
# threads, registers, shared   of a block, of a thread, bytes of a block (static and dynamic)
# blocks     blocks that a multiprocessor holds at once
# early      bytes a thread asks for before it waits for the kernel in front (from sm_90 on)
# first      memory latencies, one after another, before the first load of the main loop's kind
# loop       the same before the main loop's first load
# asked      KiB that a multiprocessor has under way at most, caches included
# turn       bytes a thread loads in a turn of the main loop; issued: its instructions; mma, barriers: of these
# dependent  loads of a turn whose address comes from another load of the turn
"""
COLUMNS = ("kernel", "gpu", *Figures._fields)

# Limits for kernels by name on sm_90, where an update of the table is not enough: weights and keys must keep coming. A
# multiprocessor of an H100 needs 18 to 23 KiB under way all the time, and some margin.
RULES = (
    (r"gemv_b?f16_\d+", "asked", 96, None),
    (r"gemv_q\w+", "asked", 48, None),
    (r"gemv_(?!f32)\w+", "barriers", None, 0),
    (r"gemv_b?f16_\d+", "first", None, 0),
    (r"gemv_b?f16_\d+", "early", 64, None),
    (r"attention_decode_\d+", "asked", 64, None),
    (r"attention_decode_\d+", "barriers", None, 0),
    (r"lora_(shrink|expand)_\w+", "asked", 32, None),
)


def parse(text):
    """Figures by kernel and architecture."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "kernel ")):
            kernel, gpu, *numbers = line.split()
            found[kernel, gpu] = Figures(*(None if number == "-" else int(number) for number in numbers))
    return found


def render(figures):
    """The table as text, by kernel and architecture."""
    cell = lambda number: "-" if number is None else str(number)  # noqa: E731
    rows = [COLUMNS, *((*key, *map(cell, figures[key])) for key in sorted(figures, key=order))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [word.ljust(width) if column < 2 else word.rjust(width)
                 for column, (word, width) in enumerate(zip(row, widths))]  # fmt: skip
        lines.append(" ".join(cells))
    return HEAD + "\n".join(lines) + "\n"


def order(key):
    kernel, gpu = key
    return kernel, int(gpu.removeprefix("sm_"))


def differences(expected, found):
    """What differs, a line for each kernel and architecture."""
    lines = []
    for key in sorted(expected.keys() | found.keys(), key=order):
        old, new, name = expected.get(key), found.get(key), " on ".join(key)
        if old is None:
            lines.append(f"{name} is new")
        elif new is None:
            lines.append(f"{name} is gone")
        elif changed := [field for field in Figures._fields if getattr(old, field) != getattr(new, field)]:
            lines.append(f"{name}: " + ", ".join(f"{field} {of(old, field)} -> {of(new, field)}" for field in changed))
    return lines


def of(figures, field):
    number = getattr(figures, field)
    return "-" if number is None else number


def broken_rules(figures):
    """Where a kernel breaks a rule on sm_90, a line each."""
    lines = []
    for kernel, gpu in sorted(figures, key=order):
        for pattern, field, least, most in RULES:
            if gpu != "sm_90" or not re.fullmatch(pattern, kernel):
                continue
            number = getattr(figures[kernel, gpu], field) or 0
            if least is not None and number < least:
                lines.append(f"{kernel} on {gpu}: {field} is {number}, at least {least} is needed")
            if most is not None and number > most:
                lines.append(f"{kernel} on {gpu}: {field} is {number}, at most {most} is allowed")
    return lines
