"""An installed Chromium, driven by Playwright: pages that remember what was asked and complained about.

Playwright brings its own driver but no browser: `apt install chromium`, or CHROMIUM names one.
"""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import time

from playwright.sync_api import sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Tests run as root in containers, which have little shared memory; the pages opened are ours.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
# What a step may take on a busy machine before it is called hung: a watchdog, not a measure of speed.
WATCHDOG_MS = 300_000
COMPLAINTS = ("error", "warning", "assert")


def program():
    """The path of an installed Chromium: CHROMIUM names it, or it is looked for."""
    named = os.environ.get("CHROMIUM")
    found = [named] if named else [path for path in map(shutil.which, PROGRAMS) if path]
    assert found, "no Chromium is installed; try: apt install chromium"
    return found[0]


@contextlib.contextmanager
def browser():
    """One browser process."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program(), args=FLAGS, timeout=WATCHDOG_MS)
        yield running
        running.close()


class Page:
    """One tab in a context of its own: no storage is shared. Keeps `requests`, and as `complaints` what the console shows."""

    def __init__(self, running, width=1280, height=800, scheme="light", touch=False, scale=None):
        self.context = running.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            has_touch=touch,
            is_mobile=touch,
            device_scale_factor=scale or (2 if touch else 1),
        )
        self.context.set_default_timeout(WATCHDOG_MS)
        self.tab = self.context.new_page()
        self.complaints = []
        self.requests = []
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", lambda said: said.type in COMPLAINTS and self.complaints.append(said.text))
        self.tab.on("request", lambda request: self.requests.append(request))
        self.eval = self.tab.evaluate
        self.click = self.tab.click
        self.type = self.tab.keyboard.insert_text
        self.press = self.tab.keyboard.press
        self.fill = self.tab.fill

    def open(self, url):
        """Opens `url` and waits until it is loaded."""
        self.tab.goto(url)

    def close(self):
        """Closes the tab and its context."""
        self.context.close()

    def wait(self, seconds):
        """Lets the page go on."""
        self.tab.wait_for_timeout(1000 * seconds)

    def until(self, script):
        """Waits until a JavaScript expression is true."""
        # Playwright's own wait compiles the script inside the page, whose policy forbids that.
        deadline = time.monotonic() + WATCHDOG_MS / 1000
        while not self.eval(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never true: {script}\nthe page says:\n{self.text('body')}"
            self.wait(0.05)

    def text(self, selector):
        """What is to be read in the first element that matches."""
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector):
        """What is to be read in every element that matches and is shown."""
        # In one script: between two of them the page may draw its list anew, and elements of the old one are not shown.
        return self.eval(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".filter((node) => node.checkVisibility({ visibilityProperty: true }))"
            ".map((node) => node.innerText.trim())"
        )

    def names(self):
        """Role and accessible name of everything that assistive technology is shown."""
        nodes = self.context.new_cdp_session(self.tab).send("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]

    def answer(self, path, status, body, headers=None):
        """From now on, requests whose path ends in `path` get this answer instead of the server's, whatever the query."""
        told = {"json": body} if isinstance(body, (dict, list)) else {"body": body}
        self.tab.route(
            lambda url: url.split("?")[0].endswith(path),
            lambda route: route.fulfill(status=status, headers=headers, **told),
        )

    def answer_by_server(self):
        """Takes back what `answer` did."""
        self.tab.unroute_all()

    def screenshot(self, path):
        """Writes what is seen to a PNG file."""
        self.tab.screenshot(path=path)

    def picture(self, path, quality):
        """Writes what is seen to a WebP file of this quality, at most 100: a fifth of a PNG file's size."""
        session = self.context.new_cdp_session(self.tab)
        taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": quality})
        pathlib.Path(path).write_bytes(base64.b64decode(taken["data"]))
