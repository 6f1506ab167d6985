"""What the tests share: places for sockets that are short enough, a fake executor, certificates."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_executor import FakeExecutor, Weights


def some_sites(seed=0):
    """Three sites: q, k and v of different widths, a layer with a bias, and one whose rows are odd."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    block = "model.layers.0.self_attn"
    return [
        [
            Weights(f"{block}.q_proj", draw(6, 8)),
            Weights(f"{block}.k_proj", draw(4, 8)),
            Weights(f"{block}.v_proj", draw(4, 8)),
        ],
        [Weights(f"{block}.o_proj", draw(8, 6), draw(8))],
        [Weights("lm_head", draw(5, 8))],
    ]


@pytest.fixture
def place():
    """A folder with a short path: names of Unix sockets have about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        yield Path(folder)


@pytest.fixture
def executor(place):
    """A fake executor with `some_sites`."""
    with FakeExecutor(place / "layers.zmq", some_sites()) as running:
        yield running


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """PEM files of a certificate for `localhost`, signed by itself, and of a client's."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")

    def make(name, *extra):
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        what = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        subprocess.run([openssl, "req", "-x509", *what, *files, *extra], check=True, capture_output=True)

    make("server", "-addext", "subjectAltName=DNS:localhost")
    make("stranger", "-addext", "subjectAltName=DNS:localhost")
    return folder


class TlsDoor:
    """TLS in front of a Unix socket, as the executor's own door is; one thread a connection."""

    def __init__(self, certificates, path, client_ca=None):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_ca)
        self._path = str(path)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain):
        from holobiont.tls_proxy import _Pump

        with contextlib.suppress(OSError):
            remote = self._context.wrap_socket(plain, server_side=True)
            remote.setblocking(False)
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.connect(self._path)
            self.connections.append((local, remote))
            with local, remote:
                _Pump(local, remote, bytearray()).run()

    def cut(self):
        """Ends every connection, as a network does."""
        for _, remote in self.connections:
            with contextlib.suppress(OSError):
                remote.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def close(self):
        self.cut()
        self._listener.close()
