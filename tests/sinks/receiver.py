"""A receiver of webhooks that does what a test says: bytes on real sockets."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Request(NamedTuple):
    """What came."""

    line: str  # POST /events HTTP/1.1
    headers: dict[str, str]  # names in small letters
    body: bytes
    connection: int  # which one it came on, counted from 1

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


HttpAnswer = bytes | None  # None: the connection is closed
Script = Callable[[Request], HttpAnswer]


def reply(status: int, body: bytes = b"", *headers: str) -> bytes:
    """An answer as a server gives it."""
    lines = "".join(f"{header}\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        lines.encode(),
        len(body),
        body,
    )


OK = reply(200)


class Receiver:
    """Answers every request as the script says; its answers may also wait, or never come."""

    def __init__(
        self,
        script: Script = lambda _: OK,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.connections = 0
        self.ended = threading.Event()  # for scripts that wait for the end
        self.close_after = 0  # how many answers a connection gets; 0: any number
        self._tls = tls
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Receiver:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        # Wakes the thread that accepts.
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other side was faster
        for thread in self._threads:
            thread.join(120)
        self._listener.close()

    def leave(self) -> None:
        """Take no more connections; those that are open go on."""
        self._listener.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/events"

    @property
    def ids(self) -> list[str]:
        """The ids of all requests, in the order they came."""
        return [request.id for request in self.requests]

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.ended.is_set():
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._sockets.append(opened)
            self._start(self._serve, opened, self.connections)

    def _serve(self, opened: socket.socket, number: int) -> None:
        try:
            if self._tls:
                opened = self._tls.wrap_socket(opened, server_side=True)
                with self._lock:
                    self._sockets.append(opened)
            self._answer(opened, number)
        except OSError:
            return  # the client let go
        finally:
            with self._lock:
                self._sockets = [each for each in self._sockets if each is not opened]
            opened.close()

    def _answer(self, opened: socket.socket, number: int) -> None:
        with opened.makefile("rb") as stream:
            answers = 0
            while line := stream.readline().decode("latin-1").strip():
                request = self._read(line, stream.readline, stream.read, number)
                with self._lock:
                    self.requests.append(request)
                answer = self.script(request)
                if answer is None:
                    return
                opened.sendall(answer)
                answers += 1
                if answers == self.close_after:
                    return

    @staticmethod
    def _read(
        line: str, next_line: Callable[[], bytes], read: Callable[[int], bytes], number: int
    ) -> Request:
        headers = {}
        while header := next_line().decode("latin-1").strip():
            name, _, value = header.partition(":")
            assert name.lower() not in headers, f"{name} came twice"
            headers[name.lower()] = value.strip()
        return Request(line, headers, read(int(headers.get("content-length", "0"))), number)


# --- certificates --------------------------------------------------------------------------------


class Certificates(NamedTuple):
    """An authority, and a server's certificate for 127.0.0.1 and hooks.test signed by it."""

    authority: Path
    server: ssl.SSLContext


def certificates(folder: Path, *names: str) -> Certificates:
    """New certificates; `names` instead of those of the server that the tests use."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("Test authority", authority_key, "Test authority", authority_key, None)
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names or ["hooks.test"]]
    if not names:
        alternatives.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    server = _certificate(
        "Test server",
        server_key,
        "Test authority",
        authority_key,
        x509.SubjectAlternativeName(alternatives),
    )
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(authority.public_bytes(pem))
    (folder / "server.pem").write_bytes(
        server.public_bytes(pem)
        + server_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return Certificates(folder / "authority.pem", context)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    alternatives: x509.SubjectAlternativeName | None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(
            x509.BasicConstraints(ca=alternatives is None, path_length=None), critical=True
        )
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
