"""Pools of pads, as the client in Rust writes them, for sites of numpy's weights."""

from __future__ import annotations

import secrets
import struct
from pathlib import Path

import numpy as np
from blake3 import blake3
from fake_executor import integers

from holobiont.fixed_point import pack, room_of
from holobiont.pool import identity_of
from holobiont.protocol import Op
from holobiont.seeded_rows import Draw

GENERATION = 2


def slot(generation, marks):
    """A half of a journal: of each file how many are burnt, and how many there are."""
    body = struct.pack(f"<{1 + 2 * len(marks)}Q", generation, *(number for mark in marks for number in mark))
    return body + blake3(body).digest()


def make_pool(path, executor, pads, commitment=None):
    """A pool in `path` with so many pads of each site of `executor`, forward and backward."""
    path.mkdir(mode=0o700)
    sites = executor.catalog.sites
    random = secrets.token_bytes(32)
    for number, layers in enumerate(executor.sites):
        weight = integers(layers).view(np.uint64)
        rooms = {word: room_of(sites[number], op) for word, op in (("forward", Op.FORWARD), ("backward", Op.BACKWARD))}
        for word, matrix in (("forward", weight.T), ("backward", weight)):
            name = f"{number:05}.{word}"
            key, data = blake3(name.encode(), key=random).digest(), b""
            made = [secrets.token_bytes(32) for _ in range(pads)]
            for block in range(0, pads, 64):
                keys, effects = b"", b""
                for pad, secret in enumerate(made[block : block + 64], block):
                    effect = pack(Draw(secret, 0).rows(1, len(matrix), rooms[word]) @ matrix, rooms[word]).tobytes()
                    keys += secret + blake3(struct.pack("<Q", 2 * pad) + secret, key=key).digest()[:16]
                    effects += effect + blake3(struct.pack("<Q", 2 * pad + 1) + effect, key=key).digest()[:16]
                data += keys.ljust(64 * 48, b"\0") + effects
            (path / name).write_bytes(data)
    half = slot(GENERATION, [(0, pads)] * (2 * len(sites)))
    assert len(half) <= 4096
    (path / "journal").write_bytes(half.ljust(4096, b"\0") + slot(GENERATION - 1, [(0, 0)] * (2 * len(sites))))
    if commitment is None:
        commitment = blake3(b"".join(site.ring.commitment for site in sites)).digest()
    machine = Path("/etc/machine-id")
    identity = identity_of((path / "journal").stat().st_ino, machine.read_bytes().strip() if machine.exists() else b"")
    manifest = struct.pack("<8sQ32sQ32s", b"HOLOPAD3", len(sites), commitment, identity, random)
    for site in sites:
        sizes = [room_of(site, op).number_bytes for op in (Op.FORWARD, Op.BACKWARD)]
        manifest += struct.pack("<4I", site.columns, site.outputs(None), *sizes)
    (path / "manifest").write_bytes(manifest + blake3(manifest).digest())
    (path / "lock").touch(mode=0o600)
    return path
