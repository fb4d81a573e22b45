"""Connections that do not come about, in words."""

from __future__ import annotations

import errno
import os
import socket
import time

import pytest

from headrace.errors import SinkUnavailable
from headrace.sinks.push.wire import Host, Wire, first_that_answers, why
from headrace.testing import free_port
from tests.sinks.proxies import nowhere


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_an_address_that_no_network_leads_to_is_told_with_what_to_do(number: int) -> None:
    told = why(OSError(number, os.strerror(number)))
    assert told == f"{os.strerror(number)}; check servers, and that no firewall is in between"


def test_each_server_is_named_with_its_own_reason() -> None:
    with nowhere() as silent:
        name, _, port = silent.rpartition(":")
        hosts = [Host(name, int(port)), Host("127.0.0.1", free_port())]
        begun = time.monotonic()
        with pytest.raises(SinkUnavailable) as failed:
            first_that_answers("NATS", hosts, 0.5, lambda wire: wire)
    assert time.monotonic() - begun < 5.0
    reasons = f"{silent}: no connection in time; check servers, and that no firewall is in between"
    assert str(failed.value) == f"NATS at {reasons}; {hosts[1]}: Connection refused"


def test_a_server_that_does_not_have_us_is_let_go_of() -> None:
    def greet(_wire: Wire) -> None:
        raise ConnectionAbortedError("it is full")

    with socket.create_server(("127.0.0.1", 0)) as server:
        host = Host("127.0.0.1", server.getsockname()[1])
        with pytest.raises(SinkUnavailable, match=f"Redis at {host}: it is full"):
            first_that_answers("Redis", [host], 5.0, greet)
        client, _ = server.accept()
        with client:
            client.settimeout(5.0)
            assert client.recv(1) == b"", "it has hung up"
