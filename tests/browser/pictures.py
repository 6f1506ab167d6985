"""Records the pictures of docs/guides/page.md: four views of the page, filled by a running deployment.

    HOLOBIONT_URL=http://127.0.0.1:8080 python tests/browser/pictures.py OUT

The deployment must serve the base and the adapters pirate, haiku and json without keys, and must train. scripts/pictures starts
such a deployment. Writes page-chat.webp, page-compare.webp, page-residency.webp and page-training.webp into the folder OUT.
"""

import contextlib
import json
import pathlib
import sys
import threading

import openai
from chromium import browser
from steps import URL, ask, opener, pick, set_options

ADAPTERS = ("pirate", "haiku", "json")
DATA = pathlib.Path(__file__).parents[2] / "examples/adapters"
# Size of the window, pixels of the picture per pixel of the window, and quality of WebP.
SMALL = {"width": 1100, "height": 690, "scale": 2}
LARGE = {"width": 1280, "height": 1050, "scale": 1.5}
QUALITY = 82
# Seconds between an answer and the caller's next question. Training computes in these pauses.
PAUSE_S = 2
# Plots of the view Residency have this number of samples, one every two seconds.
SAMPLES = 11
# The running job has done this number of steps.
STEPS = 8
# Examples of each job: some seconds of training.
EXAMPLES = 30
# Number of points of the first curve in the view that is shown.
POINTS = (
    "([...document.querySelectorAll('.frame .line[d*=L]')].find((line) => line.checkVisibility())"
    "?.getAttribute('d') ?? '').split('L').length"
)
SUCCEEDED = "[...document.querySelectorAll('.job .state')].some((state) => state.innerText.trim() === 'succeeded')"
# Number of pixels by which the view is higher than the window. The window of a picture grows by this number.
CUT = (
    "Math.max(...[...document.querySelectorAll('.log, .view')].filter((node) => node.checkVisibility())"
    ".map((node) => node.scrollHeight - node.clientHeight))"
)


def questions(adapter):
    """The questions in the data of an example adapter."""
    lines = (DATA / f"{adapter}.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


@contextlib.contextmanager
def callers(client, models):
    """One caller for each model. A caller sends one question after the other until the context ends."""
    end = threading.Event()

    def call(model, asked):
        for question in asked:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], max_tokens=64)
            if end.wait(PAUSE_S):
                return

    asked = [questions(ADAPTERS[number % len(ADAPTERS)]) for number in range(len(models))]
    threads = [threading.Thread(target=call, args=pair) for pair in zip(models, asked, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def train(client, base, adapter, name, epochs):
    """Creates a fine-tuning job that learns from the data of an example adapter."""
    examples = (DATA / f"{adapter}.jsonl").read_bytes().splitlines(keepends=True)[:EXAMPLES]
    file = client.files.create(file=(f"{name}.jsonl", b"".join(examples)), purpose="fine-tune")
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 2}}}
    client.fine_tuning.jobs.create(
        model=base, training_file=file.id, suffix=name, method=method, extra_body={"lora": {"rank": 8}}
    )


def chat(page, base):
    """Asks the base, then changes the model within the conversation."""
    pick(page, "Model", base)
    ask(page, "Give me three tips for a good night's sleep.")
    pick(page, "Model", "pirate")
    ask(page, "What is the capital of France?")


def compare(page, base):
    """Sends one question to the base and to an adapter."""
    pick(page, "Model A", base)
    pick(page, "Model B", "pirate")
    ask(page, "Why is the sky blue?")


def record(out):
    """Writes the four pictures into the folder `out`."""
    client = openai.OpenAI(base_url=f"{URL}v1", api_key="none")
    base = client.models.list().data[0].id

    def keep(page, view):
        page.eval("document.activeElement.blur()")
        page.tab.mouse.move(0, 0)
        assert not page.texts(".notice"), page.texts(".notice")
        size = page.tab.viewport_size
        page.tab.set_viewport_size({**size, "height": size["height"] + page.eval(CUT)})
        page.picture(out / f"page-{view}.webp", QUALITY)
        print(out / f"page-{view}.webp", flush=True)

    with browser() as running, opener(running) as open_page:
        for view, converse in [("chat", chat), ("compare", compare)]:
            page = open_page(view, **SMALL)
            set_options(page, temperature=0, max_tokens=200, seed=7)
            converse(page, base)
            keep(page, view)
        train(client, base, "pirate", "captain", epochs=1)
        train(client, base, "haiku", "poet", epochs=2)
        training, residency = open_page("training", **SMALL), open_page("residency", **LARGE)
        with callers(client, [base, *ADAPTERS]):
            residency.until(f"{POINTS} >= {SAMPLES}")
            keep(residency, "residency")
        residency.close()
        training.until(f"{SUCCEEDED} && {POINTS} >= {STEPS}")
        keep(training, "training")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    record(pathlib.Path(sys.argv[1]))
