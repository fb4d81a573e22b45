"""API keys: made once, kept as hashes, found only while they are valid."""

import re
from typing import Any

import msgspec
import pytest

from headrace.errors import ConfigError
from headrace.log import keys
from headrace.log.keys import Key, KeyLimits, KeyRequest, Scope
from tests.changes import make_table

NOW = 1_760_000_000_000_000
SECOND = 1_000_000


def by_hash(*kept: Key) -> dict[str, Key]:
    return {key.hash: key for key in kept}


@pytest.mark.requirement("S3-03")
def test_a_key_is_cdc_and_64_characters_and_no_two_are_alike() -> None:
    made = [keys.make(KeyRequest(), now=NOW) for _ in range(100)]
    assert all(re.fullmatch(r"cdc_[0-9a-f]{64}", each.secret) for each in made)
    assert len({each.secret for each in made}) == len({each.key.id for each in made}) == 100


def test_what_is_kept_does_not_hold_the_key() -> None:
    made = keys.make(KeyRequest(name="billing", tables=("orders",)), now=NOW)
    kept = msgspec.json.encode(made.key)
    assert made.secret.encode() not in kept
    assert made.secret.removeprefix("cdc_").encode() not in kept
    assert msgspec.json.decode(kept, type=Key) == made.key


def test_a_key_is_found_by_its_secret_alone() -> None:
    one, other = (keys.make(KeyRequest(), now=NOW) for _ in range(2))
    kept = by_hash(one.key, other.key)
    assert keys.find(kept, one.secret, now=NOW) == one.key
    assert keys.find(kept, other.secret, now=NOW) == other.key
    for wrong in (
        "",
        "cdc_",
        one.key.hash,
        one.key.id,
        one.secret[:-1],
        one.secret.upper(),
        "ä",
        "\ud800",
    ):
        assert keys.find(kept, wrong, now=NOW) is None


def test_a_key_ends_when_it_expires_or_is_revoked() -> None:
    made = keys.make(KeyRequest(seconds=90), now=NOW)
    assert keys.find(by_hash(made.key), made.secret, now=NOW + 90 * SECOND - 1) == made.key
    assert keys.find(by_hash(made.key), made.secret, now=NOW + 90 * SECOND) is None
    revoked = msgspec.structs.replace(made.key, revoked_at=NOW + SECOND)
    assert keys.find(by_hash(revoked), made.secret, now=NOW + SECOND) is None


def test_a_rotated_key_leaves_both_valid_for_the_overlap() -> None:
    limits = KeyLimits(connections=2)
    wanted = KeyRequest(name="billing", tables=("orders",), tenant="t1", limits=limits)
    old = keys.make(wanted, now=NOW)
    new, ending = keys.rotate(old.key, overlap=60, now=NOW + SECOND)
    kept = by_hash(ending, new.key)
    assert keys.find(kept, old.secret, now=NOW + 60 * SECOND) == ending
    assert keys.find(kept, old.secret, now=NOW + 61 * SECOND) is None
    found = keys.find(kept, new.secret, now=NOW + 10**6 * SECOND)
    assert found is not None
    assert (found.name, found.tables, found.tenant) == ("billing", ("orders",), "t1")
    assert (found.scopes, found.limits) == (frozenset({Scope.READ}), limits)


def test_a_rotated_key_does_not_outlive_the_time_it_was_given() -> None:
    old = keys.make(KeyRequest(seconds=30), now=NOW)
    new, ending = keys.rotate(old.key, overlap=60, now=NOW)
    assert new.key.expires_at == ending.ends_at == NOW + 30 * SECOND


def test_a_key_that_is_rotated_twice_gives_two_that_live_as_long_as_it_was_given() -> None:
    for given in (None, 1000):
        old = keys.make(KeyRequest(seconds=given), now=NOW)
        first, ending = keys.rotate(old.key, overlap=60, now=NOW)
        second, again = keys.rotate(ending, overlap=3600, now=NOW + SECOND)
        kept = by_hash(again, first.key, second.key)
        later = NOW + 999 * SECOND
        assert keys.find(kept, old.secret, now=NOW + 59 * SECOND) == again
        assert keys.find(kept, old.secret, now=NOW + 60 * SECOND) is None
        assert keys.find(kept, first.secret, now=later) == first.key
        assert keys.find(kept, second.secret, now=later) == second.key
        assert second.key.expires_at == old.key.expires_at
        assert first.key.holder == second.key.holder == old.key.id
        assert keys.listed(again, now=NOW).expires_at == NOW + 60 * SECOND


def test_a_key_sees_the_tables_it_names() -> None:
    made = keys.make(KeyRequest(tables=("orders", "audit.*")), now=NOW)
    assert made.key.allows(make_table("orders"))
    assert made.key.allows(make_table("anything", schema="audit"))
    assert not made.key.allows(make_table("customers"))
    assert keys.make(KeyRequest(), now=NOW).key.allows(make_table("customers"))


def test_durations_read_as_people_write_them() -> None:
    assert [keys.seconds(text) for text in ("45s", "30m", "12h", "90d")] == [
        45.0,
        1800.0,
        43_200.0,
        7_776_000.0,
    ]
    for wrong in ("", "90", "d", "-1d", "1.5h", "90 days"):
        with pytest.raises(ConfigError, match="no duration"):
            keys.seconds(wrong)
    with pytest.raises(ConfigError, match="100 years"):
        keys.seconds("40000d")


@pytest.mark.parametrize(
    "wanted",
    [
        KeyRequest(name="two\nlines"),
        KeyRequest(name="\x1b[31mred"),
        KeyRequest(name="x" * 201),
        KeyRequest(tables=("orders", "")),
        KeyRequest(tenant=""),
        KeyRequest(scopes=frozenset()),
        KeyRequest(seconds=0),
        KeyRequest(seconds=1e12),
        KeyRequest(limits=KeyLimits(connections=0)),
        KeyRequest(limits=KeyLimits(requests_per_second=-1.0)),
        KeyRequest(limits=KeyLimits(requests_per_second=1e-300)),
        KeyRequest(limits=KeyLimits(connections=10**30)),
        KeyRequest(limits=KeyLimits(events_per_second=float("inf"))),
        KeyRequest(limits=KeyLimits(events_per_second=float("nan"))),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(wanted: KeyRequest) -> None:
    with pytest.raises(ConfigError):
        keys.make(wanted, now=NOW)


@pytest.mark.parametrize("held", [{"tables": ("orders",)}, {"tenant": "t1"}])
def test_who_may_make_keys_is_held_to_nothing_and_so_cannot_make_itself_more(
    held: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="cdc:admin"):
        keys.make(KeyRequest(scopes=frozenset({Scope.ADMIN}), **held), now=NOW)


def test_nothing_that_prints_a_key_shows_it() -> None:
    made = keys.make(KeyRequest(), now=NOW)
    assert made.secret not in f"{made} {made!r} {made.key!r} {keys.listed(made.key, now=NOW)!r}"
    shown = msgspec.json.encode(keys.listed(made.key, now=NOW)).decode()
    assert made.key.hash not in shown
