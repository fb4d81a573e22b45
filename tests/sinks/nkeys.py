"""Keys and signed claims of NATS, as `nsc` makes them, and a server's settings that trust them."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED, _OPERATOR, _ACCOUNT, _USER = 18 << 3, 14 << 3, 0, 20 << 3
_NO_LIMITS = dict.fromkeys(
    ("subs", "conn", "leaf", "data", "payload", "imports", "exports", "streams", "consumer"), -1
)


class Key(NamedTuple):
    """A key pair and what it is for."""

    role: int
    private: Ed25519PrivateKey

    @classmethod
    def made(cls, role: int) -> Key:
        """A new one."""
        return cls(role, Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """As NATS writes it."""
        return _written(bytes([self.role]) + self.private.public_key().public_bytes_raw())

    @property
    def seed(self) -> str:
        """The secret part, as NATS writes it."""
        about = bytes([_SEED | self.role >> 5, (self.role & 31) << 3])
        return _written(about + self.private.private_bytes_raw())

    def claims(self, subject: Key, kind: str, told: dict[str, Any]) -> str:
        """What this key says of another, signed."""
        content = {
            "jti": kind,
            "iat": 1_700_000_000,
            "iss": self.public,
            "name": kind,
            "sub": subject.public,
            "nats": {**told, "type": kind, "version": 2},
        }
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, content]
        text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_base64(self.private.sign(text.encode()))}"


class Trust(NamedTuple):
    """An operator with an account that has JetStream, and its user."""

    settings: str  # of the server
    jwt: str  # the user's
    seed: str

    @classmethod
    def made(cls) -> Trust:
        """With new keys."""
        operator, account, system = Key.made(_OPERATOR), Key.made(_ACCOUNT), Key.made(_ACCOUNT)
        user = Key.made(_USER)
        allowed = {"limits": {**_NO_LIMITS, "mem_storage": -1, "disk_storage": -1}}
        accounts = {
            account.public: operator.claims(account, "account", allowed),
            system.public: operator.claims(system, "account", {"limits": _NO_LIMITS}),
        }
        own = operator.claims(operator, "operator", {"system_account": system.public})
        lines = "\n".join(f"{key}: {claims}" for key, claims in accounts.items())
        settings = (
            f"operator: {own}\nsystem_account: {system.public}\nresolver: MEMORY\n"
            f"resolver_preload: {{\n{lines}\n}}\n"
        )
        unlimited = {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        return cls(settings, account.claims(user, "user", unlimited), user.seed)

    def write(self, file: Path, seed: str = "") -> str:
        """The user's file of credentials, perhaps with another seed."""
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed or self.seed}\n------END USER NKEY SEED------\n"
        )
        return str(file)


def another_seed() -> str:
    """A seed of a user that nobody knows."""
    return Key.made(_USER).seed


def _written(data: bytes) -> str:
    checked = data + binascii.crc_hqx(data, 0).to_bytes(2, "little")
    return base64.b32encode(checked).rstrip(b"=").decode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
