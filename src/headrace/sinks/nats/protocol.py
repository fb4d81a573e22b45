"""NATS' protocol without a connection: messages to bytes, and the server's bytes to frames."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ConfigError

try:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
except ModuleNotFoundError as error:
    raise ConfigError(
        "a sink of type nats needs cryptography: pip install 'headrace[nats]'"
    ) from error

_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END")
_UNFIT = re.compile(r"[\x00-\x1f\x7f%]")


class NatsMessage(NamedTuple):
    """A message on a subject of our subscription."""

    subject: bytes
    status: bytes  # a number where there is no message, as b"503": nobody listens
    data: bytes


class NatsLine(NamedTuple):
    """Anything else, such as INFO, PING or -ERR."""

    name: bytes
    rest: bytes


NatsFrame = NatsMessage | NatsLine


def published(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """A message; `headers` are their lines and an empty one."""
    size = len(headers)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject,
        reply,
        size,
        size + len(payload),
        headers,
        payload,
    )


def request(subject: bytes, reply: bytes, payload: bytes) -> bytes:
    """A message without headers."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def header_value(text: str) -> bytes:
    """A value that ends no line; characters that would are percent-encoded."""
    return _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", text).encode()


class NatsReader:
    """Splits the bytes of the server into frames."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> Iterator[NatsFrame]:
        """The frames that these further bytes complete."""
        buffered = self._bytes + data if self._bytes else data
        at = 0
        try:
            while (end := buffered.find(b"\r\n", at)) >= 0:
                name, _, rest = buffered[at:end].partition(b" ")
                if name not in (b"MSG", b"HMSG"):
                    at = end + 2
                    yield NatsLine(name.upper(), rest)
                    continue
                words = rest.split(b" ")
                size = int(words[-1])
                last = end + 2 + size
                if len(buffered) < last + 2:
                    break
                at, begin, status = last + 2, end + 2, b""
                if name == b"HMSG":
                    headers = buffered[begin : begin + int(words[-2])]
                    begin += len(headers)
                    status = headers.partition(b"\r\n")[0].partition(b" ")[2][:3]
                yield NatsMessage(words[0], status, buffered[begin:last])
        finally:
            self._bytes = buffered[at:]


class NatsCredentials(NamedTuple):
    """What a file of credentials has: who we are, and the key that proves it."""

    jwt: str
    seed: str

    @classmethod
    def read(cls, text: str) -> NatsCredentials:
        """From a file as `nsc` writes it."""
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None:
            raise ConfigError("credentials_file has no user JWT, or no seed, in it")
        return cls(jwt[1], seed[1])

    def sign(self, nonce: str) -> str:
        """The server's challenge, signed."""
        # Two bytes of what the key is for, 32 of key, two to check them.
        seed = base64.b32decode(self.seed + "=" * (-len(self.seed) % 8))[2:34]
        signature = Ed25519PrivateKey.from_private_bytes(seed).sign(nonce.encode())
        return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
