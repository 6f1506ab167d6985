"""The real executor, for the tests that run it, and where the real model is.

HOLOBIONT_BASE_EXECUTOR is the program (`target/debug/base-executor`), HOLOBIONT_TEST_MODEL the model
(SmolLM2-135M-Instruct). What is not there is skipped by name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
EXECUTOR = pathlib.Path(os.environ.get("HOLOBIONT_BASE_EXECUTOR") or TARGET / "debug" / "base-executor")
MODEL = pathlib.Path(os.environ.get("HOLOBIONT_TEST_MODEL") or ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPT = "The capital of France is"
# A debug build on a busy machine packs the real model in minutes.
START_S = 300

needs_executor = pytest.mark.skipif(not EXECUTOR.is_file(), reason=f"there is no executor at {EXECUTOR}; cargo build")
needs_model = pytest.mark.skipif(not MODEL.is_file(), reason=f"there is no model at {MODEL}; scripts/fetch-model")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def executor(model, place, *arguments):
    """A running executor of `model`; gives the address of its private socket."""
    folder = place / "run"
    folder.mkdir(mode=0o700, exist_ok=True)
    log = place / "executor.log"
    command = [EXECUTOR, "--model", model, "--layers", folder / "layers.sock", "--exit-with-stdin", *arguments]
    with open(log, "wb") as err, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=err, stderr=err) as process:
        try:
            deadline = time.monotonic() + START_S
            while not (folder / "layers.zmq").exists():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"ipc://{folder}/layers.zmq"
        finally:
            process.kill()
