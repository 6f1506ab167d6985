"""Everything of a model but its linear weights: configuration, tokenizer, embedding, norms.

The executor lists, for each of the model's files, the ranges that it gives out. They are written into files of full length
with holes in between, which take no space on disk and open with the ordinary readers.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path as FilePath

from .errors import ProtocolError, UnsupportedModel
from .protocol import SkeletonFile
from .session import Session

__all__ = ["cached_skeleton", "is_given", "skeleton"]

_MAX_FILE_BYTES = 1 << 44


def skeleton(session: Session, folder: str | os.PathLike[str]) -> list[FilePath]:
    """Fetches the skeleton files of the session's base into `folder`; their paths, in the catalog's order.

    `holobiont.model` builds a model of them. To do so by hand, open them as usual (``from_pretrained(folder)``, or ``from_pretrained(folder, gguf_file=...)``): linear weights read as
    zeros. Then ``attach(model, session, free=True, check_weights=False)`` drops these.
    """
    target = FilePath(folder)
    target.mkdir(parents=True, exist_ok=True)
    return [_fetch(session, number, file, target) for number, file in enumerate(session.catalog.files)]


def cached_skeleton(session: Session) -> FilePath:
    """The folder of the skeleton in ``$XDG_CACHE_HOME/holobiont``, fetched if it is not there.

    Kept by endpoint as well as by base: an executor that lies about what it serves spoils nobody else's.
    """
    catalog = session.catalog
    if not catalog.files:
        raise UnsupportedModel(f"{session.endpoint} gives out no skeleton of {catalog.model}; load its files and attach")
    cache = FilePath(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "holobiont" / "python-skeletons"
    place = cache / hashlib.sha256(f"{session.endpoint} {catalog.base_hash.hex()}".encode()).hexdigest()
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=cache) as unfinished:
            whole = FilePath(unfinished) / "whole"
            skeleton(session, whole)
            try:
                whole.rename(place)
            except OSError:
                if not place.is_dir():  # another process was faster
                    raise
    return place


def is_given(file: SkeletonFile, offset: int, length: int) -> bool:
    """Whether the executor gives out all of these bytes. Others are holes, which read as zeros."""
    return any(start <= offset and offset + length <= start + bytes for start, bytes in file.ranges)


def _fetch(session: Session, number: int, file: SkeletonFile, folder: FilePath) -> FilePath:
    """One file: written beside its place and moved there when it is whole."""
    _check(file)
    path = folder / file.name
    unfinished = folder / f".{file.name}.part"
    with open(unfinished, "wb") as out:
        out.truncate(file.bytes)
        for offset, length in file.ranges:
            out.seek(offset)
            for piece in session.fetch(number + 1, offset, length):
                out.write(piece)
    os.replace(unfinished, path)
    return path


def _check(file: SkeletonFile) -> None:
    """The executor does not get to choose where on this machine it writes, nor how much."""
    if not file.name or file.name in (".", "..") or any(c in file.name for c in "/\\\0"):
        raise ProtocolError(f"the catalog names a file {file.name!r}, which is no plain file name")
    if file.bytes > _MAX_FILE_BYTES or any(offset + length > file.bytes for offset, length in file.ranges):
        raise ProtocolError(f"the catalog's ranges of {file.name} lie outside of the file")
