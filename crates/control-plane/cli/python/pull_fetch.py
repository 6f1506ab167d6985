"""Fetches the wheel of a package into a directory; what an interrupted run left there is continued, not fetched again.

Usage: pull_fetch.py DIRECTORY PACKAGE          pip says where the wheel is and what its hash is
       pull_fetch.py DIRECTORY --url URL SHA256
Prints lines: `file NAME BYTES`, `at BYTES` (of that file, never less than before), `wheel PATH`; or `done PATH` for each
file of a wheel that was fetched and unpacked before and is still whole.
Exits with 3 if pip cannot say where the wheel is, or the address does not answer: then pip itself may still fetch it.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

STEP_BYTES = 1 << 20
ATTEMPTS = 5
TIMEOUT_S = 30
LET_PIP_DO_IT = 3


def locate(package):
    """Address and hash of the wheel that pip would choose, from the index that pip is set up for."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    options = ["--only-binary=:all:", "--disable-pip-version-check", "--report", "-", "--", package]
    answer = subprocess.run(pip + options, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        info = json.loads(answer.stdout)["install"][0]["download_info"]
        return info["url"], info["archive_info"]["hashes"]["sha256"]
    except (ValueError, LookupError):
        sys.exit(LET_PIP_DO_IT)


def unpacked_before(receipt):
    """The files that a wheel gave, if all are still there in their full length."""
    try:
        lines = [line.split(" ", 1) for line in receipt.read_text().splitlines()]
        paths = [receipt.parent / name for _, name in lines]
        whole = all(path.stat().st_size == int(size) for path, (size, _) in zip(paths, lines))
        return paths if whole else []
    except (OSError, ValueError):
        return []


def append(url, part):
    """Fetches what is missing at the end of `part`. True once nothing is missing."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        # A server without ranges sends everything again.
        resumed = answer.status == 206
        have = have if resumed else 0
        total_bytes = have + int(answer.headers["Content-Length"])
        print("file", part.name, total_bytes, flush=True)
        with open(part, "ab" if resumed else "wb") as target:
            while chunk := answer.read(STEP_BYTES):
                target.write(chunk)
                have += len(chunk)
                print("at", have, flush=True)
            target.flush()
            os.fsync(target.fileno())
    return have >= total_bytes


def fetch(url, part):
    for attempt in range(ATTEMPTS):
        try:
            if append(url, part):
                return
        except urllib.error.HTTPError as error:
            if error.code == 416:
                # Nothing is missing, or what is there is not of this file: the hash will tell.
                return
            sys.exit(LET_PIP_DO_IT)
        except (OSError, urllib.error.URLError, ValueError, TypeError) as error:
            print(f"interrupted: {error}; going on", flush=True)
        time.sleep(min(2**attempt / 4, 2))
    sys.exit(LET_PIP_DO_IT)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        while chunk := source.read(STEP_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def main(directory, package, *direct):
    url, expected = direct if package == "--url" else locate(package)
    stem = pathlib.Path(directory) / f".pull-{expected[:16]}"
    paths = unpacked_before(stem.with_suffix(".done"))
    for path in paths:
        print("done", path, flush=True)
    if paths:
        return
    wheel, part = stem.with_suffix(".whl"), stem.with_suffix(".part")
    # One from an earlier run may be whole and not unpacked yet.
    for _ in range(2):
        if not wheel.exists():
            fetch(url, part)
            os.replace(part, wheel)
        if sha256(wheel) == expected:
            print("wheel", wheel, flush=True)
            return
        wheel.unlink()
    sys.exit(f"{url.rsplit('/', 1)[-1]} does not have the hash that the index promised")


main(*sys.argv[1:])
