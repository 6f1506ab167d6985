"""The models, and what they are asked."""

import json
from dataclasses import dataclass

from page_parts import ROOT

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n    ",
)
GREEDY_TOKENS = 32
TOP = 20

# The text and windows of `scripts/bench divergence`: no model has seen this repository's guides.
GUIDES = ("security", "services", "split", "streaming")
WINDOW, WINDOWS = 512, 4


@dataclass(frozen=True)
class Model:
    """A model by its name in scripts/fetch-model."""

    name: str
    title: str
    file: str

    @property
    def path(self):
        return ROOT / ".models" / self.file


MODELS = (
    Model("smollm2", "SmolLM2-135M-Instruct, Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    Model("gemma", "Gemma 3 270M, Q4_K_M", "gemma-3-270m-q4_k_m.gguf"),
    Model("qwen-0.5b", "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    Model("qwen-1.5b", "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
)


def text():
    return "".join((ROOT / f"docs/guides/{guide}.md").read_text() for guide in GUIDES)


def lessons():
    """What the LoRA is trained on: conversations of an example adapter, as plain text."""
    for line in (ROOT / "examples/adapters/pirate.jsonl").read_text().splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"][-2:])
        yield f"Question: {question}\nAnswer: {answer}\n"
