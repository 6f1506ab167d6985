"""What claims run: programs that print lines of JSON, and tests by name."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from page_parts import ROOT

MODEL = ".models/SmolLM2-135M-Instruct.Q4_1.gguf"
PEER = ".peers/llama.cpp"
SMOLLM2 = "SmolLM2-135M-Instruct, Q4_1"
GPU_MODEL = "simulated: 7 billion weights on a GPU"


class CommandError(Exception):
    """A command that printed no figures; the message says why."""


@dataclass(frozen=True)
class Tools:
    """Where the programs are, and the Python that has PEFT, if one is named."""

    programs: Path
    torch_python: str | None = None

    def path(self, program):
        return self.programs / program


@dataclass(frozen=True)
class Program:
    """One of our programs, which prints lines of JSON. Claims with equal commands share one run."""

    name: str
    words: tuple[str, ...]
    model: str
    seed: str
    quick_seeds: int | None = None
    needs_peft: bool = False

    def shown(self):
        return " ".join((self.name, *self.words))

    def missing(self, tools):
        if not tools.path(self.name).is_file():
            return f"{self.name} is not built: scripts/build"
        if MODEL in self.words and not (ROOT / MODEL).is_file():
            return "the model is not there: scripts/fetch-model"
        if PEER in self.words and not (ROOT / PEER).is_dir():
            return "llama.cpp is not built: scripts/build-peer"
        if self.needs_peft and not tools.torch_python:
            return "no Python with PEFT is named: --torch-python"
        return None

    def output(self, tools):
        environment = {"HOLOBIONT_TORCH_PYTHON": tools.torch_python} if tools.torch_python else {}
        done = _run([str(tools.path(self.name)), *self.words], environment)
        if done.returncode and "{" not in done.stdout:
            raise CommandError(_end(done.stderr))
        return done.stdout

    def shortened(self):
        """The simulator's command with few seeds; other commands stay as they are."""
        if self.quick_seeds is None:
            return self
        *words, _ = self.words
        return replace(self, words=(*words, str(self.quick_seeds)), seed=f"1 to {self.quick_seeds}")


def bench(name, *options, **fields):
    """A benchmark of scripts/bench."""
    return Program("holobiont-bench", (name, "--model", MODEL, *options), fields.pop("model", SMOLLM2), "fixed", **fields)


def simulator(command, *options, seeds=20, quick_seeds=4):
    """A command of the simulator, whose equal seeds give equal bytes."""
    words = (command, *options, "--seeds", str(seeds))
    return Program("holobiont-simulator", words, GPU_MODEL, f"1 to {seeds}", quick_seeds)


@dataclass(frozen=True)
class Tests:
    """Tests of the workspace by their functions' names, with variables that set how often they repeat."""

    names: tuple[str, ...]
    model: str
    seed: str = "1"
    variables: tuple[str, ...] = ()
    needs_model: bool = False

    def words(self):
        named = " + ".join(f"test(/\\b{name}$/)" for name in self.names)
        return ["cargo", "nextest", "run", "--workspace", "--no-fail-fast", "--success-output", "immediate", "-E", named]

    def shown(self):
        *words, named = self.words()
        return " ".join((*self.variables, *words, f"'{named}'"))

    def missing(self, _):
        if not shutil.which("cargo-nextest"):
            return "cargo-nextest is not installed"
        if self.needs_model and not (ROOT / MODEL).is_file():
            return "the model is not there: scripts/fetch-model"
        return None

    def output(self, _):
        environment = dict(variable.split("=", 1) for variable in self.variables)
        environment["HOLOBIONT_TEST_MODEL"] = str(ROOT / MODEL)
        done = _run(self.words(), environment)
        if "Summary [" not in done.stderr:
            raise CommandError(_end(done.stderr))
        return done.stdout + done.stderr

    def shortened(self):
        return self


def tests(*names, model="tiny models of tests/golden", **fields):
    return Tests(names, model, **fields)


@dataclass(frozen=True)
class NotHere:
    """No command: the reason says what this claim would take."""

    reason: str
    model = seed = "none"

    def shown(self):
        return ""

    def missing(self, _):
        return self.reason

    def shortened(self):
        return self


def _run(words, variables):
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _end(text):
    return "\n".join(text.strip().splitlines()[-5:]) or "it printed nothing"
