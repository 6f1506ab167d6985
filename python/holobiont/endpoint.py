"""Where an executor is, and how it is known to be the right one."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .errors import EndpointError

__all__ = ["Credentials", "Endpoint", "LocalEndpoint", "TlsEndpoint", "parse_endpoint"]


@dataclass(frozen=True)
class LocalEndpoint:
    """The executor's private Unix socket, on the same host."""

    path: str

    advice = "is an executor up there (holobiont up), and is this its state directory or layer socket?"

    def __str__(self) -> str:
        return f"ipc://{self.path}"


@dataclass(frozen=True)
class TlsEndpoint:
    """An executor's layer door on the network."""

    host: str
    port: int

    advice = "is the executor up, with --layer-listen, and is this its host and port?"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tls://{host}:{self.port}"


Endpoint = LocalEndpoint | TlsEndpoint


def parse_endpoint(given: str | os.PathLike[str]) -> Endpoint:
    """Reads ``tls://host:port``, or a path (plain, or behind ``ipc://``): of the executor's directory, or of a layer socket."""
    text = os.fspath(given)
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        return _local(rest)
    if scheme == "tls":
        return _tls(text)
    if scheme == "tcp":
        raise EndpointError(f"{text} would send activations unencrypted; use tls://host:port")
    if text.startswith(("/", "./", "../", "~")) or not isinstance(given, str):
        return _local(os.path.expanduser(text))
    raise EndpointError(f"{text!r} is no endpoint; use tls://host:port, or the path of the executor's directory on its host")


def _local(path: str) -> LocalEndpoint:
    """The ZeroMQ socket; clients that share memory are given the directory or ``layers.sock``, which it lies in or beside."""
    if os.path.isdir(path):
        return LocalEndpoint(os.path.join(path, "layers.zmq"))
    stem, extension = os.path.splitext(path)
    return LocalEndpoint(f"{stem}.zmq" if extension == ".sock" else path)


def _tls(text: str) -> TlsEndpoint:
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.username:
        raise EndpointError(f"{text!r} is no endpoint; write it as tls://host:port")
    return TlsEndpoint(host, port)


@dataclass(frozen=True)
class Credentials:
    """Who we are, and whom we believe.

    `api_key` is what the operator gave you. `ca` is a PEM file with the certificates to trust instead of the system's;
    `certificate` and `certificate_key` are PEM files of a client certificate.
    """

    api_key: str | None = field(default=None, repr=False)
    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    certificate_key: str | os.PathLike[str] | None = None

    def tls(self) -> ssl.SSLContext:
        """TLS 1.3 with the server's name and chain verified."""
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.certificate_key)
        except OSError as error:  # SSLError is one too
            raise EndpointError(f"a certificate file cannot be used: {error}; check ca and certificate") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context
