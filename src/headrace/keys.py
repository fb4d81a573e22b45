"""API keys: who may read what.

A key is `cdc_` and 64 random characters. It is shown once, when it is made; what is kept is its
hash. Keys that are unknown, expired or revoked are told apart by nobody outside.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from .errors import ConfigError
from .event import Table

PREFIX = "cdc_"
_SHAPE = re.compile(r"cdc_[0-9a-f]{64}")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?P<number>\d{1,9})(?P<unit>[smhd])")


class Scope(StrEnum):
    """What a key may do."""

    READ = "cdc:read"
    ADMIN = "cdc:admin"  # also trims, copies again, moves cursors and makes keys


class Limits(msgspec.Struct, frozen=True):
    """How much one key may ask at once; None: as much as it likes."""

    connections: int | None = None
    requests_per_second: float | None = None
    events_per_second: float | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept."""

    id: str  # names it in lists, logs and commands; tells nothing of the key itself
    hash: str
    name: str = ""  # what people call it
    scopes: frozenset[Scope] = frozenset({Scope.READ})
    tables: tuple[str, ...] = ()  # globs; none: all
    tenant: str | None = None  # whose rows it may see; None: everybody's
    limits: Limits = Limits()
    created_at: int  # microseconds since 1970, as all times here
    expires_at: int | None = None
    revoked_at: int | None = None

    def valid(self, now: int) -> bool:
        """Whether it opens anything at this time."""
        ended = [moment for moment in (self.expires_at, self.revoked_at) if moment is not None]
        return now < min(ended, default=now + 1)

    def allows(self, table: Table) -> bool:
        """Whether it may see a table."""
        return not self.tables or any(map(table.matches, self.tables))


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asks of a new key."""

    name: str = ""
    scopes: frozenset[Scope] = frozenset({Scope.READ})
    tables: tuple[str, ...] = ()
    tenant: str | None = None
    limits: Limits = Limits()
    seconds: float | None = None  # how long it lives; None: until it is revoked


class Made(msgspec.Struct, frozen=True):
    """A new key, and the only time that it is seen."""

    secret: str
    key: Key


def make(wanted: Wanted, *, now: int) -> Made:
    """A new key from the system's generator."""
    secret = PREFIX + secrets.token_hex(32)
    expires = None if wanted.seconds is None else now + int(wanted.seconds * 1_000_000)
    key = Key(
        id=f"key_{secrets.token_hex(6)}",
        hash=_hash(secret),
        name=wanted.name,
        scopes=wanted.scopes,
        tables=wanted.tables,
        tenant=wanted.tenant,
        limits=wanted.limits,
        created_at=now,
        expires_at=expires,
    )
    return Made(secret, key)


def rotate(old: Key, *, overlap: float, now: int) -> tuple[Made, Key]:
    """A new key with the same rights, and the old one, which ends after `overlap` seconds."""
    wanted = Wanted(
        name=old.name, scopes=old.scopes, tables=old.tables, tenant=old.tenant, limits=old.limits
    )
    made = make(wanted, now=now)
    lives_until = now + int(overlap * 1_000_000)
    if old.expires_at is not None:
        # The new key may not outlive what the old one was given.
        made = Made(made.secret, msgspec.structs.replace(made.key, expires_at=old.expires_at))
        lives_until = min(lives_until, old.expires_at)
    return made, msgspec.structs.replace(old, expires_at=lives_until)


def find(kept: Mapping[str, Key], secret: str, *, now: int) -> Key | None:
    """The valid key that this is, of those kept by their hash; None whatever is wrong with it.

    How long it takes depends on nothing that the caller does not know.
    """
    digest = _hash(secret if _SHAPE.fullmatch(secret) else "")
    key = kept.get(digest, _NOBODY)
    same, valid = hmac.compare_digest(key.hash, digest), key.valid(now)
    return key if same and valid else None


def seconds(text: str) -> float:
    """A duration such as 90d, 12h, 30m or 45s; ConfigError when it is none."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no duration; write a number and s, m, h or d, such as 90d")
    return float(int(found["number"]) * _UNITS[found["unit"]])


def _hash(secret: str) -> str:
    # Plain: 256 random bits cannot be guessed, so nothing is gained by a slow hash.
    return hashlib.sha256(secret.encode()).hexdigest()


_NOBODY = Key(id="", hash=_hash(secrets.token_hex(32)), created_at=0)  # stands for unknown keys
