"""What a deployment answers, and llama.cpp's perplexity."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from page_parts import ROOT
from verified.models import GREEDY_TOKENS, TOP, WINDOW, WINDOWS, text

PEER = ROOT / ".peers/llama.cpp/llama-perplexity"
START_S, ANSWER_S = 300, 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Deployment:
    """A running deployment of a model with one adapter."""

    def __init__(self, url):
        self.url = url

    def post(self, body):
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def ask(self, body):
        [choice] = self.post(body)["choices"]
        return choice

    def numbers(self):
        """The numeric settings, as receipts name them."""
        answer = self.post({"model": "base", "prompt": [1], "max_tokens": 1, "receipt": True})
        return answer["receipt"]["record"]["settings"]["numbers"]

    def greedy(self, model, prompt):
        """Tokens that follow a prompt, and for each the likeliest tokens with their log-probabilities."""
        choice = self.ask({
            "model": model, "prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": TOP,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
        })  # fmt: skip
        tops = choice["logprobs"]["top_logprobs"]
        return choice["token_ids"], [{int(name.removeprefix("token_id:")): value for name, value in top.items()} for top in tops]

    def perplexity(self, model, windows):
        losses = []
        for window in windows:
            choice = self.ask({"model": model, "prompt": window, "max_tokens": 0, "prompt_logprobs": 0})
            judged = list(zip(window, choice["prompt_logprobs"]))[WINDOW // 2 + 1 :]
            losses.append(-sum(told[str(token)]["logprob"] for token, told in judged) / len(judged))
        return math.exp(sum(losses) / len(losses))


@contextlib.contextmanager
def deployment(programs, model, adapter, precision):
    """A deployment that serves the model as `base` and the adapter as `lora`, until the block ends."""
    with tempfile.TemporaryDirectory() as state:
        url = f"127.0.0.1:{free_port()}"
        words = [programs / "holobiont", "up", "--model", model, "--state", state, "--listen", url, "--adapter", f"lora={adapter}"]
        environment = {**os.environ, "HOLOBIONT_SERVED_MODEL_NAME": "base", "HOLOBIONT_PRECISION": precision}
        with (Path(state) / "log").open("w") as log, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, env=environment) as up:
            try:
                if not up.stdout.readline():
                    raise RuntimeError((Path(state) / "log").read_text()[-2000:])
                yield Deployment(f"http://{url}")
            finally:
                up.send_signal(signal.SIGTERM)
                up.wait()


def llama_cpp_perplexity(model):
    """The peer's perplexity of the same windows, or nothing where the peer is not built."""
    if not PEER.is_file():
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text())
        file.flush()
        words = [PEER, "-m", model, "-f", file.name, "-c", str(WINDOW), "--chunks", str(WINDOWS), "-t", "2"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)[1])
