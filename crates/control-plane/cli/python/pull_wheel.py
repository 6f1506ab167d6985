"""Copies the GGUF files of a wheel into a directory, under their own names, each complete or not at all.

Usage: pull_wheel.py WHEEL DIRECTORY
Prints lines: `file NAME BYTES`, `at BYTES` (of that file), `done PATH`.
"""

import os
import pathlib
import re
import shutil
import sys
import zipfile

STEP_BYTES = 1 << 20


def copy(source, target, name, total_bytes):
    print("file", name, total_bytes, flush=True)
    copied = 0
    while chunk := source.read(STEP_BYTES):
        target.write(chunk)
        copied += len(chunk)
        print("at", copied, flush=True)
    target.flush()
    os.fsync(target.fileno())


def main(wheel, directory):
    directory = pathlib.Path(directory)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename.rsplit("/", 1)[-1]
            # The archive is somebody else's: its names stay inside the directory.
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.gguf", name):
                continue
            if member.file_size > shutil.disk_usage(directory).free:
                sys.exit(f"{name} has {member.file_size} bytes, more than are free in {directory}")
            part = directory / f".{name}.{os.getpid()}.part"
            try:
                with archive.open(member) as source, open(part, "xb") as target:
                    copy(source, target, name, member.file_size)
                os.replace(part, directory / name)
            finally:
                part.unlink(missing_ok=True)
            print("done", directory / name, flush=True)


try:
    main(*sys.argv[1:])
except (OSError, zipfile.BadZipFile) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
