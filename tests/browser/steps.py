"""What somebody does on the page, and what is answered in the server's place."""

import contextlib
import json
import os
import pathlib

from chromium import Page

URL = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1") + "/"
HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
# The answer's text without the draft behind it, which may be taken back.
SAID = (
    "((text) => { text?.querySelector('.soft')?.remove(); return text?.textContent ?? ''; })"
    "(document.querySelector('.answer[aria-busy=true] .text')?.cloneNode(true))"
)
MODELS_SHOWN = "document.querySelector('.picker bdi').textContent !== '…'"
GENERATION = "0123456789abcdef" * 4


@contextlib.contextmanager
def opener(running):
    """Opens the page, with answers in the server's place if any are given, and waits until it shows the models."""
    pages = []

    def open_page(view="chat", answers=(), until=MODELS_SHOWN, **options):
        page = Page(running, **options)
        pages.append(page)
        for answer in answers:
            page.answer(*answer)
        page.open(f"{URL}#/{view}")
        if until:
            page.until(until)
        return page

    yield open_page
    for page in pages:
        page.close()


def look(page, name):
    """Leaves a picture, if somebody wants to look."""
    folder = os.environ.get("HOLOBIONT_SCREENSHOTS")
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(os.path.join(folder, f"{name}.png"))


def pick(page, label, model):
    """Picks a model as somebody with a keyboard does: opens the list, searches, Enter."""
    view = page.eval("location.hash").replace("/", "")
    page.click(f"{view} [data-picker='{label}']")
    page.type(model)
    page.press("Enter")
    page.until(f"document.querySelector(`{view} [data-picker='{label}'] bdi`).textContent === {json.dumps(model)}")


def set_options(page, **fields):
    page.eval("document.getElementById('settings').open = true")
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.eval("document.getElementById('settings').open = false")


def ask(page, question):
    """Sends a message and waits until every answer to it has ended."""
    page.fill("#prompt", question)
    page.press("Enter")
    page.until("!document.getElementById('send').hidden && !document.querySelector('[aria-busy=true]')")


def answers(page):
    """The answers of the view that is shown: their text and their facts by name."""
    return page.eval(
        "[...document.querySelectorAll('.answer')].filter((node) => node.checkVisibility()).map((node) => ({"
        " text: node.querySelector('.text').textContent, model: node.querySelector('h3').textContent,"
        " facts: Object.fromEntries([...node.querySelectorAll('[data-fact]')].map("
        "   (fact) => [fact.dataset.fact, fact.textContent])) }))"
    )


def refusal(status, code, message, headers=None, path=CHAT):
    body = {"error": {"message": message, "type": "some_error", "param": None, "code": code}}
    return (path, status, body, headers or {})


def stream(*pieces, thought=(), ending="data: [DONE]\n\n"):
    """An event stream whose pieces are the answer's text, behind those of a thought."""
    deltas = [{"reasoning_content": piece} for piece in thought] + [{"content": piece} for piece in pieces]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ending
    return (CHAT, 200, body, {"content-type": "text/event-stream"})


def cards(*adapters):
    base = {"id": "base", "object": "model", "parent": None, "adapter_generation": None}
    models = [{"id": name, "object": "model", "parent": "base", "adapter_generation": GENERATION} for name in adapters]
    return (MODELS, 200, {"object": "list", "data": [base, *models]})


def job(**fields):
    plan = {"steps": 20, "epochs": 2}
    return {"id": "ftjob-1", "status": "running", "step": 4, "plan": plan, "user_provided_suffix": "sailor", **fields}


def events(*losses):
    return [
        {"id": f"ftevent-{step}", "data": {"step": step, "train_loss": loss}}
        for step, loss in reversed(list(enumerate(losses, 1)))
    ]


def training(*jobs, losses=(4.0, 3.0, 2.0, 1.0)):
    listed = ("/v1/fine_tuning/jobs", 200, {"object": "list", "data": list(jobs), "has_more": False})
    said = [
        (f"/v1/fine_tuning/jobs/{job['id']}/events", 200, {"data": events(*losses), "has_more": False}) for job in jobs
    ]
    return [listed, *said]


def status(**fields):
    """What `/v1/status` says of a small server with one executor."""
    blocks = {"total": 1000, "running": 100, "history": 200, "adapters": 50, "free": 650}
    held = {f"{kind}_bytes": 0 for kind in ("weights", "blocks", "adapters", "history", "workers", "clients", "drafts")}
    held |= {"limit_bytes": 8 << 30, "weights_bytes": 100 << 20, "workers_bytes": 24 << 20}
    told = {
        "requests": {"running": 3, "waiting": 1}, "tokens_per_s": {"prompt": 200.0, "generated": 40.0},
        "kv_blocks": {"total": 1000, "used": 100, "cached": 200}, "uptime_s": 60, "adapter_root": "/srv/adapters",
        "memory": {"block_bytes": 1 << 16, "device": blocks, "held": held},
        "adapters": {"resident": 1, "registered": 1, "bytes": 1 << 20, "budget_bytes": 1 << 28},
    }
    return ("/v1/status", 200, {**told, **fields})


def adapter(name="pirate", **fields):
    """A row of `/v1/lora_adapters`."""
    return {"name": name, "generation": GENERATION, "rank": 8, "bytes": 3 << 20, "tenant": None, "tier": "host",
            "state": "ready", "error": None, "pinned": False, "requests": 0, "tokens_per_s": 0.0, **fields}


def table(*rows):
    return ("/v1/lora_adapters", 200, {"object": "list", "data": list(rows)})
