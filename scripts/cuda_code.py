"""PTX of the CUDA kernels, and the machine code that NVIDIA's assembler makes of it, without a GPU and without CUDA.

cuda-compile, cuda-cubins and cuda-sass share this. NVIDIA's tools come from PyPI once, in the versions of
scripts/cuda-requirements.txt, into .cuda-toolchain, which git ignores. Machine code is kept there too, by the hash of
what it is made of.
"""

import fcntl
import gzip
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = pathlib.Path("kernels/cuda")
ARCHIVE = SOURCES / "kernels.ptx.gz"
REQUIREMENTS = pathlib.Path("scripts/cuda-requirements.txt")
TOOLCHAIN = pathlib.Path(".cuda-toolchain")

# Machine code that nobody has asked for in so many days is deleted.
KEPT_DAYS = 14
# First architecture at which a kernel may begin before the preceding one has ended (kernels/src/cuda/modules.rs).
EARLY_ARCHITECTURE = 90


class Failure(Exception):
    """Something that the caller can do something about."""


class Resources(NamedTuple):
    """What a kernel takes, in registers a thread and bytes."""

    registers: int
    shared: int
    stack: int
    spilled: int


def die(message, remedy=None):
    print(f"error: {message}", file=sys.stderr)
    if remedy:
        print(f"  try: {remedy}", file=sys.stderr)
    sys.exit(1)


def toolchain():
    """The folder of NVIDIA's packages, fetched unless it is there."""
    wanted = REQUIREMENTS.read_text()
    stamp = TOOLCHAIN / "requirements.txt"
    TOOLCHAIN.mkdir(exist_ok=True)
    with open(TOOLCHAIN / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            print("==> fetching NVIDIA's compiler into .cuda-toolchain", file=sys.stderr)
            fetch()
            stamp.write_text(wanted)
    return next(TOOLCHAIN.glob("lib/python*/site-packages/nvidia"))


def fetch():
    """Installs the pinned packages into a virtual environment of their own."""
    if subprocess.run([sys.executable, "-m", "venv", "--clear", TOOLCHAIN / "new"]).returncode:
        raise Failure("python3 can make no virtual environment; try: apt install python3-venv")
    pip = [TOOLCHAIN / "new/bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    if subprocess.run([*pip, "--requirement", REQUIREMENTS]).returncode:
        raise Failure("pip could not fetch NVIDIA's compiler; its message is above")
    subprocess.run(["rm", "-rf", TOOLCHAIN / "lib"], check=True)
    (TOOLCHAIN / "new/lib").rename(TOOLCHAIN / "lib")
    subprocess.run(["rm", "-rf", TOOLCHAIN / "new"], check=True)


def archived():
    """The archived PTX of each kernel file: name -> text."""
    text = gzip.decompress(ARCHIVE.read_bytes()).decode() if ARCHIVE.exists() else ""
    parts = re.split(r"^(?=// source )", text, flags=re.MULTILINE)[1:]
    return {re.match(r"// source \w+ of (\w+)\.cu", part).group(1): part for part in parts}


def text_for(ptx, gpu):
    """The text as a GPU takes it, with or without what the oldest ones lack (kernels/src/cuda/modules.rs)."""
    if int(gpu.removeprefix("sm_")) >= EARLY_ARCHITECTURE:
        return ptx.replace(".target sm_80\n", ".target sm_90\n", 1)
    return "".join(line for line in ptx.splitlines(keepends=True) if not line.startswith("griddepcontrol."))


def assemble(packages, name, ptx, gpu):
    """The file of a kernel file's machine code, and what the assembler said of it."""
    text = text_for(ptx, gpu).encode()
    key = hashlib.sha256(b"%s\n%s\n%s" % (REQUIREMENTS.read_bytes(), gpu.encode(), text)).hexdigest()
    kept = TOOLCHAIN / "code"
    kept.mkdir(exist_ok=True)
    cubin, log = kept / f"{key}.cubin", kept / f"{key}.log"
    if not (cubin.exists() and log.exists()):
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            # The name is the same everywhere, so that no path of this machine can get into the code.
            pathlib.Path(folder, "kernels.ptx").write_bytes(text)
            command = [(packages / "cuda_nvcc/bin/ptxas").resolve(), "--verbose", "--gpu-name", gpu]
            command += ["--output-file", "kernels.cubin", "kernels.ptx"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise Failure(f"ptxas refuses the PTX of {name} for {gpu}\n{done.stderr.strip()}")
            pathlib.Path(folder, "log").write_text(done.stderr)
            pathlib.Path(folder, "kernels.cubin").rename(cubin)
            pathlib.Path(folder, "log").rename(log)
    os.utime(cubin)
    return cubin, log.read_text()


def forget_old_code():
    """Deletes machine code that nobody has asked for lately."""
    oldest = time.time() - KEPT_DAYS * 86400
    for cubin in (TOOLCHAIN / "code").glob("*.cubin"):
        if cubin.stat().st_mtime < oldest:
            cubin.unlink()
            cubin.with_suffix(".log").unlink(missing_ok=True)


ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def resources(log):
    """What each kernel takes, from what the assembler said: name -> Resources."""
    found, kernel, stack, spilled = {}, None, 0, 0
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            kernel, stack, spilled = entry.group(1), 0, 0
        elif frame := STACK.search(line):
            stack, spilled = int(frame.group(1)), int(frame.group(2)) + int(frame.group(3))
        elif registers := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[kernel] = Resources(int(registers.group(1)), int(shared.group(1)) if shared else 0, stack, spilled)
    return found


def refuse_spills(name, taken):
    """Fails, by name, where a kernel of a kernel file spills registers on any of the architectures."""
    if spills := sorted({kernel for of_gpu in taken for kernel, numbers in of_gpu.items() if numbers.spilled}):
        raise Failure(f"{name}: registers spill in {', '.join(spills)}")
