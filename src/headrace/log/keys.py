"""API keys: who may read what.

A key is `cdc_` and 64 random characters. It is shown once, when it is made; what is kept is its
hash. Keys that are unknown, expired or revoked look the same from outside.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from ..change.event import Table
from ..change.glob import LONGEST_GLOB, MOST_GLOBS
from ..errors import ConfigError

PREFIX = "cdc_"
OPERATOR = "operator"  # id of the key that commands on the server's machine have
_SHAPE = re.compile(r"cdc_[0-9a-f]{64}")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SECONDS = 100 * 365 * 86_400
LEAST, MOST = 0.001, 1_000_000_000  # of any limit
LONGEST_TEXT = LONGEST_GLOB  # characters of a name, a glob or a tenant
_DURATION = re.compile(r"(?P<number>\d{1,12})(?P<unit>[smhd])")


class Scope(StrEnum):
    """What a key may do."""

    READ = "cdc:read"
    ADMIN = "cdc:admin"  # also trims, takes snapshots, moves cursors and makes keys


class KeyLimits(msgspec.Struct, frozen=True):
    """How much one key may ask at once; None: as much as it likes."""

    connections: int | None = None
    requests_per_second: float | None = None
    events_per_second: float | None = None

    def given(self) -> tuple[float | None, ...]:
        """The three of them."""
        return (self.connections, self.requests_per_second, self.events_per_second)


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept."""

    id: str  # names it in lists, logs and commands; says nothing of the key itself
    hash: str
    name: str = ""  # what people call it
    scopes: frozenset[Scope] = frozenset({Scope.READ})
    tables: tuple[str, ...] = ()  # globs; none: all
    tenant: str | None = None  # whose rows it may see; None: everybody's
    limits: KeyLimits = KeyLimits()
    created_at: int  # microseconds since 1970, as all times here
    expires_at: int | None = None
    revoked_at: int | None = None
    replaced_at: int | None = None  # when the overlap with the key that replaces it is over
    first: str = ""  # id of the key that it was rotated from in the end; "": it is the first

    @property
    def holder(self) -> str:
        """Whom it stands for: the same after every rotation."""
        return self.first or self.id

    def valid(self, now: int) -> bool:
        """Whether it opens anything at this time."""
        ends = [moment for moment in (self.ends_at, self.revoked_at) if moment is not None]
        return now < min(ends, default=now + 1)

    @property
    def ends_at(self) -> int | None:
        """When it ends by itself; None: it does not."""
        ends = [moment for moment in (self.expires_at, self.replaced_at) if moment is not None]
        return min(ends, default=None)

    def allows(self, table: Table) -> bool:
        """Whether it may see a table."""
        return not self.tables or any(map(table.matches, self.tables))


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a new key is to be good for."""

    name: str = ""
    scopes: frozenset[Scope] = frozenset({Scope.READ})
    tables: tuple[str, ...] = ()
    tenant: str | None = None
    limits: KeyLimits = KeyLimits()
    seconds: float | None = None  # how long it lives; None: until it is revoked


class IssuedKey(msgspec.Struct, frozen=True):
    """A new key, and the only time that it is seen."""

    secret: str
    key: Key

    def __repr__(self) -> str:
        return f"IssuedKey(secret='***', key={self.key.id})"


class KeyState(StrEnum):
    """Whether a key opens anything."""

    VALID = "valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class ListedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is shown in lists."""

    id: str
    name: str
    state: KeyState
    scopes: list[Scope]
    tables: list[str]
    tenant: str | None
    limits: KeyLimits
    created_at: int
    expires_at: int | None
    revoked_at: int | None


def listed(key: Key, *, now: int) -> ListedKey:
    """A key without what opens anything."""
    ended = KeyState.EXPIRED if key.revoked_at is None else KeyState.REVOKED
    return ListedKey(
        id=key.id,
        name=key.name,
        state=KeyState.VALID if key.valid(now) else ended,
        scopes=sorted(key.scopes),
        tables=list(key.tables),
        tenant=key.tenant,
        limits=key.limits,
        created_at=key.created_at,
        expires_at=key.ends_at,
        revoked_at=key.revoked_at,
    )


def make(wanted: KeyRequest, *, now: int) -> IssuedKey:
    """A new key from the system's generator; ConfigError when such a key makes no sense."""
    _check(wanted)
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
    return IssuedKey(secret, key)


def rotate(old: Key, *, overlap: float, now: int) -> tuple[IssuedKey, Key]:
    """A new key with the same rights, and the old one, which ends after `overlap` seconds.

    One that was rotated before ends no later than it would have.
    """
    wanted = KeyRequest(
        name=old.name, scopes=old.scopes, tables=old.tables, tenant=old.tenant, limits=old.limits
    )
    made = make(wanted, now=now)
    replaced = now + int(overlap * 1_000_000)
    if old.replaced_at is not None:
        replaced = min(replaced, old.replaced_at)
    # The new key may not outlive what the old one was given, which the overlap does not shorten.
    new = msgspec.structs.replace(made.key, expires_at=old.expires_at, first=old.holder)
    return IssuedKey(made.secret, new), msgspec.structs.replace(old, replaced_at=replaced)


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
    number = int(found["number"]) * _UNITS[found["unit"]]
    if number > LONGEST_SECONDS:
        raise ConfigError(f"{text!r} is too long a duration; it may be 100 years at most")
    return float(number)


def _check(wanted: KeyRequest) -> None:
    for text in (wanted.name, *wanted.tables, wanted.tenant or "-"):
        if len(text) > LONGEST_TEXT or not text.isprintable():
            raise ConfigError(
                f"{text[:LONGEST_TEXT]!r} is not printable, or has more than {LONGEST_TEXT} "
                "characters; a key's name, tables and tenant must be plain text"
            )
    if len(wanted.tables) > MOST_GLOBS:
        raise ConfigError(
            f"a key has at most {MOST_GLOBS} patterns of tables, and this one {len(wanted.tables)}"
        )
    if not wanted.scopes:
        raise ConfigError("a key needs a scope: cdc:read or cdc:admin")
    if not all(wanted.tables) or wanted.tenant == "":
        raise ConfigError("a table or tenant of a key is empty; leave it out, and all are allowed")
    if Scope.ADMIN in wanted.scopes and (wanted.tables or wanted.tenant is not None):
        # It could make itself a key for everything.
        raise ConfigError("a key with cdc:admin cannot be held to tables or to a tenant")
    if wanted.seconds is not None and not 0 < wanted.seconds <= LONGEST_SECONDS:
        raise ConfigError("a key must live for at least a second, and at most for 100 years")
    for limit in wanted.limits.given():
        if limit is not None and not LEAST <= limit <= MOST:
            raise ConfigError(
                f"a key's limit must be from {LEAST} to {MOST}, and is {limit}; leave out what "
                "has none"
            )


def _hash(secret: str) -> str:
    # Plain: 256 random bits cannot be guessed, so nothing is gained by a slow hash.
    return hashlib.sha256(secret.encode()).hexdigest()


_NOBODY = Key(id="", hash=_hash(secrets.token_hex(32)), created_at=0)  # stands for unknown keys
