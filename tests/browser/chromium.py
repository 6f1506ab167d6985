"""A headless Chromium, driven over the DevTools protocol through a pair of pipes.

`--remote-debugging-pipe` makes Chromium read commands from file descriptor 3 and write answers to 4, as JSON that ends
in a NUL. So there is no port that others could reach, and nothing to install but the browser: `apt install chromium`.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # Tests run as root in containers; the pages opened are ours.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# What a step may take on a busy machine before it is called hung: a watchdog, not a measure of speed.
WATCHDOG_S = 60


class BrowserError(Exception):
    """The browser refused a command, a script threw, or something awaited never came."""


def program():
    """The path of an installed Chromium: CHROMIUM names it, or it is looked for."""
    named = os.environ.get("CHROMIUM")
    found = [named] if named else [path for path in map(shutil.which, PROGRAMS) if path]
    if not found:
        raise BrowserError("no Chromium is installed; try: apt install chromium")
    return found[0]


class Browser:
    """One browser process with a profile of its own under `profile`."""

    def __init__(self, profile):
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # The browser wants the numbers 3 and 4; a shell moves them there without a fork of our own.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [program(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._log = open(os.path.join(profile, "browser.log"), "wb")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received = b""
        self._last_id = 0
        self._pages = {}

    def page(self, **options):
        """A new, empty page in a context of its own: no storage is shared."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context, **options)
        self._pages[session] = page
        page.prepare()
        return page

    def forget(self, page):
        """Closes a page and its context."""
        del self._pages[page.session]
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def call(self, method, session=None, **params):
        """Sends a command and returns its result; events that come in between are handled."""
        mine = self.send(method, session, **params)
        deadline = time.monotonic() + WATCHDOG_S
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == mine:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._handle(answer)

    def send(self, method, session=None, **params):
        """Sends a command and returns its number."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        return self._last_id

    def pump(self, seconds):
        """Handles events for some time."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while True:
                self._handle(self._receive(deadline, None))

    def close(self):
        """Ends the browser, kindly first."""
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._log.close()

    def _handle(self, message):
        page = self._pages.get(message.get("sessionId"))
        if page:
            page.on_event(message.get("method"), message.get("params", {}))

    def _receive(self, deadline, waiting_for):
        while b"\0" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                if waiting_for is None:
                    raise TimeoutError
                raise BrowserError(f"no answer to {waiting_for} within {WATCHDOG_S} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise BrowserError("the browser has ended; its log is browser.log in its profile")
            self._received += data
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One tab. What the console and the network complain about is kept in `complaints`."""

    def __init__(self, browser, session, context, width=1280, height=800, scheme="light", touch=False):
        self.browser, self.session, self.context = browser, session, context
        self.size, self.scheme, self.touch = (width, height), scheme, touch
        self.complaints = []
        self.requests = []
        self._answers = []

    def prepare(self):
        """Sets the size and the colour scheme, and listens."""
        width, height = self.size
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if self.touch else 1, mobile=self.touch,
        )
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": self.scheme}]
        )
        # Every page is a page that is looked at, however many there are.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method, **params):
        """Sends a command to this page."""
        return self.browser.call(method, self.session, **params)

    def close(self):
        """Closes the page."""
        self.browser.forget(self)

    def open(self, url):
        """Opens `url` and waits until it is loaded."""
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url} cannot be opened: {failed}")
        self.until("document.readyState === 'complete'")

    def eval(self, script):
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, script):
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + WATCHDOG_S
        while time.monotonic() < deadline:
            if self.eval(f"Boolean({script})"):
                return
            self.browser.pump(0.05)
        raise BrowserError(f"never true: {script}\nthe page says:\n{self.text('body')}")

    def text(self, selector):
        """What is to be read in the first element that matches."""
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector):
        """What is to be read in every element that matches and is shown."""
        return self.eval(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".filter((node) => node.checkVisibility()).map((node) => node.innerText.trim())"
        )

    def click(self, selector):
        """Presses the mouse in the middle of an element, as a person would: what covers it gets the click."""
        where = json.dumps(selector)
        self.until(f"document.querySelector({where})?.checkVisibility()")
        x, y = self.eval(
            f"(() => {{ const node = document.querySelector({where}); node.scrollIntoView({{ block: 'nearest' }});"
            " const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        """Types text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key, code):
        """Presses a key that writes nothing, for example ("Enter", 13)."""
        extra = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def fill(self, selector, text):
        """Replaces what a field holds."""
        field = json.dumps(selector)
        self.eval(f"(() => {{ const field = document.querySelector({field}); field.focus(); field.select(); }})()")
        self.type(text) if text else self.press("Delete", 46)

    def answer(self, path, status, body, headers=None):
        """From now on, requests whose path is `path` get this answer instead of the server's."""
        if isinstance(body, (dict, list)):
            headers = {"content-type": "application/json", **(headers or {})}
            body = json.dumps(body)
        self._answers = [entry for entry in self._answers if entry[0] != path]
        self._answers.append((path, status, body, headers or {}))
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{entry[0]}"} for entry in self._answers])

    def answer_by_server(self):
        """Takes back what `answer` did."""
        self._answers = []
        self.call("Fetch.disable")

    def screenshot(self, path):
        """Writes what is seen to a PNG file."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def on_event(self, method, params):
        """Keeps what matters of what the browser tells."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Fetch.requestPaused":
            self._fulfill(params)

    def _fulfill(self, paused):
        for path, status, body, headers in self._answers:
            if paused["request"]["url"].endswith(path):
                # Sent without waiting: this runs inside the wait for something else.
                self.browser.send(
                    "Fetch.fulfillRequest", self.session, requestId=paused["requestId"], responseCode=status,
                    responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
                    body=base64.b64encode(body.encode()).decode(),
                )
                return
        self.browser.send("Fetch.continueRequest", self.session, requestId=paused["requestId"])
