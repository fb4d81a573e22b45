"""The webhook sink connects to public addresses, and to none but those that it has checked."""

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.secret import Secret
from headrace.sinks.push import DeliveryOutcome
from headrace.sinks.webhook.address import endpoint, special
from headrace.sinks.webhook.sink import Webhook
from tests.sinks.hooks import answers, channel, event
from tests.sinks.receiver import Receiver, certificates


def words(*lines: str) -> list[str]:
    """The words of some lines."""
    return " ".join(lines).split()


# --- which addresses are public ------------------------------------------------------------------

SPECIAL = words(
    "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255",
    "127.0.0.1 127.255.0.9 169.254.169.254 169.254.170.2 168.63.129.16 172.16.0.1",
    "172.31.255.255 192.0.0.192 192.0.2.1 192.168.1.1 198.18.0.1 198.19.255.255 198.51.100.7",
    "203.0.113.7 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 fc00::1 fd00:ec2::254",
    "fd12:3456::1 fe80::1 fec0::1 ff02::1 2001:db8::1 3fff::1 100::1 5f00::1 2001::1 2001:10::1",
    "2001:20::1 2001:2::1 64:ff9b:1::1 ::7f00:1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1",
    "::ffff:169.254.169.254 64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 2002:7f00:1:: 2002:a00:1::5",
    "2002:a9fe:a9fe:: 2606:4700::5efe:10.0.0.1 2606:4700::200:5efe:7f00:1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
)
PUBLIC = words(
    "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 93.184.216.34 100.63.255.255 100.128.0.0",
    "126.255.255.255 128.0.0.0 172.15.255.255 172.32.0.0 192.0.1.1 192.167.255.255",
    "198.17.255.255 198.20.0.0 223.255.255.255 2606:4700::1111 2a00:1450:4001:81b::200e",
    "2001:4860:4860::8888 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1",
)


@pytest.mark.parametrize("address", SPECIAL)
def test_an_address_that_is_not_of_the_public_internet_is_known(address: str) -> None:
    assert special(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_public(address: str) -> None:
    assert special(ipaddress.ip_address(address)) == ""


@given(st.ip_addresses())
def test_what_python_knows_to_be_private_is_never_public(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if address.is_private or address.is_multicast or address.is_reserved or address.is_link_local:
        carried = getattr(address, "ipv4_mapped", None)
        in_nat64 = (
            address in ipaddress.ip_network("64:ff9b::/96") if address.version == 6 else False
        )
        assert special(address) or carried or in_nat64


# --- urls ----------------------------------------------------------------------------------------

HOSTS = words(
    "127.0.0.1 127.1 0x7f.1 0x7f000001 2130706433 017700000001 0 10.0.0.1 169.254.169.254",
    "192.168.0.1 [::1] [::] [::ffff:127.0.0.1] [::ffff:7f00:1] [fd00:ec2::254] [fe80::1]",
    "[64:ff9b::7f00:1] [2002:7f00:1::]",
)


@pytest.mark.parametrize("host", HOSTS)
def test_a_url_with_such_an_address_is_refused_when_the_config_is_read(host: str) -> None:
    with pytest.raises(ConfigError, match="allow_private_networks: true") as caught:
        Webhook(name="hooks", url=Secret(f"https://{host}:8443/t0ken"))
    assert "t0ken" not in str(caught.value)
    Webhook(name="hooks", url=Secret(f"http://{host}/"), allow_private_networks=True)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://hooks.example/t0ken", "only https:// is allowed"),
        ("ftp://hooks.example/t0ken", "does not begin with https://"),
        ("file:///etc/t0ken", "does not begin with https://"),
        ("hooks.example/t0ken", "does not begin with https://"),
        ("https:///t0ken", "does not begin with https://"),
        ("", "does not begin with https://"),
        ("https://user:t0ken@hooks.example/", "holds a user or a password"),
        ("https://t0ken@hooks.example/", "holds a user or a password"),
        ("https://@hooks.example/t0ken", "holds a user or a password"),
        ("https://hooks.example/#t0ken", "ends in a # part"),
        ("https://hooks.example:t0ken/", "its host or port cannot be read"),
        ("https://hooks.example:70000/t0ken", "its host or port cannot be read"),
        ("https://hooks.example:0/t0ken", "its port is 0"),
        ("https://127.0.0.1./t0ken", "a loopback address"),
        ("https://2130706433./t0ken", "a loopback address"),
        ("https://[::1/t0ken", "its host or port cannot be read"),
        (f"https://{'a' * 64}.example/t0ken", "its host or port cannot be read"),
        ("https://hooks.example/t0ken\r\nX-A: 1", "a space or a control character"),
        ("https://hooks.example/t0ken x", "a space or a control character"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_shown(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Webhook(name="hooks", url=Secret(url))
    assert problem in str(caught.value)
    assert "t0ken" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_url_is_taken_apart() -> None:
    made = endpoint("https://Höoks.example:8443/a b".replace(" ", "%20") + "?x=ü", private=False)
    assert made.origin == "https://xn--hoks-5qa.example:8443"
    assert made.target == "/a%20b?x=%C3%BC"
    assert repr(made) == "Endpoint('https://xn--hoks-5qa.example:8443')"
    assert endpoint("https://[2606:4700::1]", private=False).authority == "[2606:4700::1]"
    assert endpoint("https://a.example:443", private=False).authority == "a.example"


# --- names, and what they resolve to -------------------------------------------------------------


def resolver(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """The system's resolver gives these answers in turn, the last for ever; who asked."""
    asked: list[str] = []
    system = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if not host.endswith(".test"):
            return system(host, port, *args, **options)
        asked.append(host)
        given = answers[min(len(asked), len(answers)) - 1]
        return [found for each in given for found in system(each, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize("host", ["localhost", "localhost.", "ip6-localhost"])
def test_a_name_of_this_machine_is_not_connected_to(host: str, tmp_path: Path) -> None:
    with Receiver(tls=certificates(tmp_path).server) as receiver:
        url = f"https://{host}:{receiver.port}/"
        with channel(url, allow_private_networks=False) as opened:
            [said] = opened.send([event(1)])
    assert said.outcome is DeliveryOutcome.UNREACHABLE
    assert receiver.connections == 0


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["93.184.216.34", "127.0.0.1"],  # one of several is enough
    ],
)
def test_a_host_at_a_private_address_is_not_connected_to(
    found: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolver(monkeypatch, found)
    with Receiver(tls=certificates(tmp_path).server) as receiver:
        url = f"https://hooks.test:{receiver.port}/t0ken"
        with channel(url, allow_private_networks=False) as opened:
            said = opened.send([event(1), event(2, 2)])
    assert set(answers(said)) == {DeliveryOutcome.UNREACHABLE}
    assert "set allow_private_networks: true" in said[0].reason
    assert "t0ken" not in said[0].reason
    assert receiver.connections == 0


def test_a_host_that_changes_its_address_after_the_check_gains_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = resolver(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    with Receiver(tls=certificates(tmp_path).server) as receiver:
        url = f"https://hooks.test:{receiver.port}/"
        settings = {"allow_private_networks": False, "timeout_seconds": 0.3}
        with channel(url, **settings) as opened:
            # It connects to what it has checked, wherever that is …
            [said] = opened.send([event(1)])
            assert len(asked) == 1
            assert "hooks.test is at" not in said.reason
            # … and what the resolver says next is checked as well.
            [again] = opened.send([event(1)])
    assert said.outcome is again.outcome is DeliveryOutcome.UNREACHABLE
    assert "hooks.test is at 127.0.0.1, a loopback address" in again.reason
    assert receiver.connections == 0


def test_a_connection_goes_to_the_address_that_was_asked_for_first_under_the_hosts_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = resolver(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
    made = certificates(tmp_path)
    with Receiver(tls=made.server) as receiver:
        url = f"https://hooks.test:{receiver.port}/"
        with channel(url, ca_file=str(made.authority)) as opened:
            said = opened.send([event(number, number) for number in range(40)])
    assert set(answers(said)) == {DeliveryOutcome.ACCEPTED}
    assert asked == ["hooks.test"]  # once, for all of its connections
    assert receiver.requests[0].headers["host"] == f"hooks.test:{receiver.port}"


def test_when_one_address_does_not_answer_the_next_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver(monkeypatch, ["127.0.0.9", "127.0.0.1"])
    with Receiver() as receiver, channel(f"http://hooks.test:{receiver.port}/") as opened:
        assert answers(opened.send([event(1)])) == [DeliveryOutcome.ACCEPTED]


def test_a_resolver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:

        def getaddrinfo(*_: object, **__: object) -> Any:
            receiver.ended.wait(60)
            raise OSError("too late")

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        with channel("https://hooks.test/", timeout_seconds=0.2) as opened:
            [said] = opened.send([event(1)])
    assert said.outcome is DeliveryOutcome.UNREACHABLE
    assert said.reason == "the resolver does not answer for hooks.test"
