"""The keys that a server knows, on a clock that the test moves."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import LogError
from headrace.log import Log
from headrace.log.keys import Key, KeyRequest
from headrace.serve.access import Access
from headrace.serve.keyring import Keyring
from headrace.testing import wait_until

SECOND = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1_760_000_000 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "log") as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keyring(log: Log, clock: Clock) -> Keyring:
    return Keyring(log, clock=clock)


def test_access_ends_the_moment_its_key_expires(keyring: Keyring, clock: Clock) -> None:
    made = keyring.create(KeyRequest(seconds=90))
    access = Access(made.key, keyring)
    clock.now += 90 * SECOND - 1
    assert access.valid()
    assert keyring.find(made.secret) == made.key
    clock.now += 1
    assert not access.valid()
    assert keyring.find(made.secret) is None


def test_access_ends_the_moment_its_key_is_revoked(keyring: Keyring) -> None:
    made, other = keyring.create(KeyRequest()), keyring.create(KeyRequest())
    access, bystander = Access(made.key, keyring), Access(other.key, keyring)
    keyring.revoke(made.key.id)
    assert not access.valid()
    assert bystander.valid()


def test_access_by_a_rotated_key_lasts_for_the_overlap(keyring: Keyring, clock: Clock) -> None:
    old = keyring.create(KeyRequest())
    access = Access(old.key, keyring)
    new = keyring.rotate(old.key.id, overlap=60)
    assert new is not None
    clock.now += 60 * SECOND - 1
    assert access.valid()
    clock.now += 1
    assert not access.valid()
    assert Access(new.key, keyring).valid()


def test_access_without_a_key_is_for_everything_and_for_ever() -> None:
    access = Access()
    assert (access.admin, access.whole, access.tenant, access.valid()) == (True, True, None, True)
    access.admit()
    with access.connected():
        assert access.spend(10**9) == 0


def test_what_became_of_keys_outlives_the_process(log: Log, clock: Clock) -> None:
    keyring = Keyring(log, clock=clock)
    valid, revoked = keyring.create(KeyRequest()), keyring.create(KeyRequest())
    clock.now += 1
    keyring.revoke(revoked.key.id)
    again = Keyring(log, clock=clock)
    assert again.find(valid.secret) == valid.key
    assert again.find(revoked.secret) is None
    assert again.all() == keyring.all()


def test_a_server_is_usable_while_one_key_is_valid(keyring: Keyring, clock: Clock) -> None:
    usable = [keyring.usable]
    keyring.create(KeyRequest(seconds=10))
    usable.append(keyring.usable)
    clock.now += 10 * SECOND
    usable.append(keyring.usable)
    assert usable == [False, True, False]


def test_a_key_that_could_not_be_stored_opens_nothing(
    keyring: Keyring, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = keyring.create(KeyRequest())

    def refuse(key: Key) -> None:
        raise LogError("the disk is full")

    monkeypatch.setattr(log, "put_key", refuse)
    with pytest.raises(LogError):
        keyring.create(KeyRequest())
    with pytest.raises(LogError):
        keyring.revoke(made.key.id)
    # Nobody is told of a revocation that a restart would forget.
    assert keyring.all() == [made.key]


def test_a_rotation_does_not_bring_back_a_key_that_is_revoked_meanwhile(
    keyring: Keyring, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = keyring.create(KeyRequest())
    storing, go_on = threading.Event(), threading.Event()
    put_key = log.put_key

    def slow(key: Key) -> None:
        if not storing.is_set():  # the rotation's first; all others pass
            storing.set()
            assert go_on.wait(120)
        put_key(key)

    monkeypatch.setattr(log, "put_key", slow)
    rotating = threading.Thread(target=keyring.rotate, args=(made.key.id,), kwargs={"overlap": 60})
    revoking = threading.Thread(target=keyring.revoke, args=(made.key.id,))
    rotating.start()
    assert storing.wait(120)
    revoking.start()
    revoking.join(0.3)  # it must wait for the rotation; if it does not, it is done by then
    go_on.set()
    for thread in (rotating, revoking):
        thread.join(120)
    wait_until(lambda: keyring.find(made.secret) is None, message="the key is revoked")
    (old,) = [key for key in keyring.all() if key.id == made.key.id]
    assert old.revoked_at is not None
