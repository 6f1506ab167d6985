#!/usr/bin/env python3
"""Asks a running gateway's base model and every adapter one question at once, and shows the answers side by side.

    side-by-side.py URL QUESTION

On a terminal each answer grows in a column of its own; elsewhere they follow one another. Standard library only.
"""

import json
import os
import queue
import shutil
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request

MAX_TOKENS = 64
MIN_COLUMN = 18
GAP = "  "


def models(url):
    """Names that `model` may be, the base first."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        cards = json.load(response)["data"]
    return [card["id"] for card in sorted(cards, key=lambda card: card.get("parent") is not None)]


def ask(url, model, question):
    """Yields pieces of an answer as they come."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def printable(text):
    """The model does not get to drive the terminal."""
    return "".join(c for c in text if c.isprintable() or c == "\n")


class Answer:
    """One model's answer, as far as it has come."""

    def __init__(self, model):
        self.model = model
        self.text = ""
        self.state = "waiting"
        self.first_ms = None

    def first(self):
        return "..." if self.first_ms is None else f"first token {self.first_ms:.0f} ms"

    def lines(self, width):
        text = self.text + ("▌" if self.state == "answering" else "")
        return [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]


def follow(url, answer, question, events):
    """Runs in a thread of its own: sends each piece of an answer to `events`, then how it ended."""
    start = time.monotonic()
    try:
        for piece in ask(url, answer.model, question):
            events.put((answer, printable(piece), (time.monotonic() - start) * 1000))
        events.put((answer, None, None))
    except urllib.error.HTTPError as error:
        events.put((answer, None, f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"))
    except (OSError, RuntimeError, ValueError) as error:
        events.put((answer, None, str(error)))


def take(event):
    """Brings an answer up to date; returns what went wrong, if something did."""
    answer, piece, more = event
    if piece is None:
        answer.state = "done"
        return more
    if piece and answer.first_ms is None:
        answer.first_ms = more
    answer.state = "answering"
    answer.text += piece
    return None


def table(answers, width):
    """The answers in columns, as lines."""
    column = (width - len(GAP) * (len(answers) - 1)) // len(answers)
    cells = [answer.lines(column) for answer in answers]
    rows = [[answer.model[:column] for answer in answers], [answer.first()[:column] for answer in answers]]
    rows.append(["─" * column for _ in answers])
    height = max(len(lines) for lines in cells)
    rows += [[lines[i] if i < len(lines) else "" for lines in cells] for i in range(height)]
    return [GAP.join(cell.ljust(column) for cell in row).rstrip() for row in rows]


def columns_fit(answers, width):
    """True if there is a terminal wide enough for a column each."""
    return sys.stdout.isatty() and width // len(answers) >= MIN_COLUMN and os.environ.get("TERM") != "dumb"


def show_columns(answers, events):
    """Redraws the columns whenever a piece comes."""
    drawn, failures = 0, []
    while any(answer.state != "done" for answer in answers):
        batch = [events.get()]
        while not events.empty():
            batch.append(events.get())
        failures += [(event[0], failure) for event in batch if (failure := take(event))]
        size = shutil.get_terminal_size()
        # What has scrolled away cannot be redrawn.
        lines = table(answers, size.columns - 1)[: size.lines - 1]
        up = f"\x1b[{drawn}A" if drawn else ""
        sys.stdout.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        sys.stdout.flush()
        drawn = max(drawn, len(lines))
        if len(lines) < drawn:
            sys.stdout.write("\n" * (drawn - len(lines)))
    return failures


def show_in_turn(answers, events):
    """Prints each answer when it is whole."""
    failures = []
    while any(answer.state != "done" for answer in answers):
        event = events.get()
        answer = event[0]
        if failure := take(event):
            failures.append((answer, failure))
        elif answer.state == "done":
            print(f"[{answer.model}, {answer.first()}]\n{answer.text.strip()}\n", flush=True)
    return failures


def main(url, question):
    answers = [Answer(model) for model in models(url)]
    events = queue.Queue()
    print(f"\nQ: {question}\n", flush=True)
    for answer in answers:
        threading.Thread(target=follow, args=(url, answer, question, events), daemon=True).start()
    show = show_columns if columns_fit(answers, shutil.get_terminal_size().columns) else show_in_turn
    failures = show(answers, events)
    for answer, failure in failures:
        print(f"{answer.model}: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        sys.exit(main(sys.argv[1].rstrip("/"), sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]} does not answer: {error}")
