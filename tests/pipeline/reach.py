"""Something between a reader and a server that breaks what passes."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit


class Relay:
    """Passes bytes to a server and back; it can cut connections short, and speak TLS."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        address = urlsplit(url)
        self._server = (address.hostname or "", address.port or 0)
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://localhost:{self._listening.getsockname()[1]}"
        self.cut_after: list[int] = []  # bytes of the answer after which a connection is cut
        self.cuts = 0
        self.heard = b""  # what clients said

    def serve(self) -> None:
        """Take connections until the listening socket is closed."""
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        # Closing alone would not wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _pass_on(self, client: socket.socket) -> None:
        try:
            if self._tls:
                client = self._tls.wrap_socket(client, server_side=True)
        except OSError:
            client.close()
            return
        with client, socket.create_connection(self._server) as server:
            asking = threading.Thread(target=self._ask, args=(client, server), daemon=True)
            asking.start()
            self._answer(server, client)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            asking.join()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.heard += data
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        left = self.cut_after.pop(0) if self.cut_after else None
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data if left is None else data[:left])
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        self.cuts += 1
                        return


@contextmanager
def relaying(url: str, tls: ssl.SSLContext | None = None) -> Iterator[Relay]:
    """A relay before a server, until the context ends."""
    relay = Relay(url, tls)
    thread = threading.Thread(target=relay.serve, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.close()
        thread.join()


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that only this test trusts, and a server's use of it."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
