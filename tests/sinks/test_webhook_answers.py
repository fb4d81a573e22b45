"""What the webhook sink makes of answers, good and bad, and of endpoints that give none."""

import email.utils
import json
import logging
import pickle
import re
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SinkRefused, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import DeliveryOutcome
from headrace.sinks.webhook.pool import LONGEST_BODY, LONGEST_HEAD
from headrace.sinks.webhook.response import (
    LONGEST_AFTER,
    HttpResponse,
    SecretMask,
    excerpt,
    reply_to,
    retry_seconds,
)
from headrace.testing import free_port, wait_until
from tests.sinks.hooks import SECRET, answers, channel, event, sink
from tests.sinks.receiver import OK, Receiver, Request, certificates, reply

ACCEPTED, REFUSED, FAILED, UNSENT, UNREACHABLE = (
    DeliveryOutcome.ACCEPTED,
    DeliveryOutcome.REFUSED,
    DeliveryOutcome.FAILED,
    DeliveryOutcome.UNSENT,
    DeliveryOutcome.UNREACHABLE,
)


# --- statuses ------------------------------------------------------------------------------------

STATUSES = {
    ACCEPTED: (200, 201, 202, 204, 299),
    REFUSED: (300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 409, 413, 415, 422, 451, 499),
    UNSENT: (429,),
    FAILED: (408, 425, 500, 501, 502, 503, 504, 529, 599),
}


@pytest.mark.requirement("C-19", "S1-39")
@pytest.mark.parametrize(
    ("status", "answer"),
    [(status, answer) for answer, statuses in STATUSES.items() for status in statuses],
)
def test_every_status_has_its_meaning(status: int, answer: DeliveryOutcome) -> None:
    with Receiver(lambda _: reply(status)) as receiver, channel(receiver) as opened:
        [said] = opened.send([event(1)])
    assert said.outcome is answer
    if answer is not ACCEPTED:
        assert f"it answered {status}" in said.reason


def test_an_endpoint_that_is_gone_ends_the_sink_and_its_path_does_not_show() -> None:
    with Receiver(lambda _: reply(410)) as receiver, channel(receiver) as opened:
        with pytest.raises(SinkRefused, match="410 Gone") as caught:
            opened.send([event(1), event(2, 2)])
        assert caught.value.hint
        assert "/events" not in caught.value.explain()
        assert not caught.value.retry


def test_a_redirect_is_not_followed() -> None:
    with Receiver() as other:
        moved = reply(307, b"", f"Location: {other.url}")
        with Receiver(lambda _: moved) as receiver, channel(receiver) as opened:
            [said] = opened.send([event(1)])
    assert said.outcome is REFUSED
    assert "redirects are not followed" in said.reason
    assert other.requests == []


def test_an_answer_that_is_announced_waits_for_the_answer_itself() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    with Receiver(lambda _: early + OK) as receiver, channel(receiver) as opened:
        assert answers(opened.send([event(1)])) == [ACCEPTED]
        assert answers(opened.send([event(2)])) == [ACCEPTED]
    assert receiver.connections == 1


# --- when to ask again ---------------------------------------------------------------------------

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("", 0.0),
        ("0", 0.0),
        ("7", 7.0),
        ("99999999999", LONGEST_AFTER),
        ("-5", 0.0),
        ("soon", 0.0),
        ("1.5", 0.0),
        ("²", 0.0),
        (email.utils.formatdate(NOW + 42, usegmt=True), 42.0),
        (email.utils.formatdate(NOW + 42), 42.0),
        (email.utils.formatdate(NOW - 42, usegmt=True), 0.0),
        (email.utils.formatdate(NOW + 1e8, usegmt=True), LONGEST_AFTER),
        ("Fri, 99 Foo 2026 00:00:00 GMT", 0.0),
        ("1 Jan 99999999999999999999 00:00:00 GMT", 0.0),
        ("Mon, 01 Jan 0001 00:00:00 +2359", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", LONGEST_AFTER),
    ],
)
def test_retry_after_is_a_number_or_a_time_and_never_too_long(given: str, seconds: float) -> None:
    assert retry_seconds(given, NOW) == seconds


pieces = st.sampled_from(["Mon,", "01", "Jan", "2026", "00:00:00", "GMT", "-9999", "9" * 23, ":"])


@given(st.text() | st.lists(pieces).map(" ".join))
def test_anything_may_come_as_retry_after(text: str) -> None:
    assert 0 <= retry_seconds(text, NOW) <= LONGEST_AFTER


def test_a_tired_endpoint_is_left_alone_for_as_long_as_it_asks() -> None:
    def script(request: Request) -> bytes:
        return reply(429, b"", "Retry-After: 300") if request.id == "evt_2" else OK

    told = [event(number, number) for number in range(50)]
    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        said = opened.send(told)
        again = opened.send([event(99)])
    assert answers(said) == [ACCEPTED, ACCEPTED, *[UNSENT] * 48]
    assert said[2].retry_after == 300
    assert {each.retry_after for each in said[3:]} == {300}
    # Nor is it asked in the next call.
    assert answers(again) == [UNSENT]
    assert 0 < again[0].retry_after <= 300
    assert again[0].reason == said[2].reason == "it answered 429 Too Many Requests"
    assert receiver.ids == ["evt_0", "evt_1", "evt_2"]


def test_an_endpoint_that_does_not_say_for_how_long_rests_longer_each_time() -> None:
    told = [event(number, number) for number in range(50)]
    schedule = {"retry_first_seconds": 0.02, "retry_jitter": 0.0, "concurrency": 4}
    with Receiver(lambda _: reply(429)) as receiver, channel(receiver, **schedule) as opened:

        def pause() -> float:
            """What it gets, once it was asked."""
            before = len(receiver.requests)
            said = opened.send(told)
            assert set(answers(said)) == {UNSENT}
            assert len({each.retry_after for each in said}) == 1
            return said[0].retry_after if len(receiver.requests) > before else 0.0

        pauses = [wait_until(pause) for _ in range(3)]
        assert len(receiver.requests) == 3 * 4, "the rest of a window is not even tried"
        receiver.script = lambda _: OK
        wait_until(lambda: set(answers(opened.send(told))) == {ACCEPTED})
        receiver.script = lambda _: reply(429)
        pauses.append(wait_until(pause))
    assert pauses == [0.02, 0.04, 0.08, 0.02]


def test_one_that_fails_at_an_event_is_still_asked_for_the_others() -> None:
    def script(request: Request) -> bytes:
        return reply(503) if request.id == "evt_0" else OK

    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        said = opened.send([event(number, number) for number in range(5)])
    assert answers(said) == [FAILED, *[ACCEPTED] * 4]


# --- no answer, or half of one -------------------------------------------------------------------


def test_an_endpoint_that_takes_and_never_answers_is_not_asked_for_each_event() -> None:
    with Receiver() as receiver:
        receiver.script = lambda _: None if receiver.ended.wait(60) else OK
        with channel(receiver, timeout_seconds=0.2, concurrency=2) as opened:
            said = opened.send([event(number, number) for number in range(100)])
    assert answers(said[:2]) == [FAILED, FAILED]
    assert set(answers(said[2:])) == {UNSENT}
    assert said[0].reason == "no answer within 0.2 s"
    assert len(receiver.requests) == 2


def test_one_slow_event_delays_no_other_row() -> None:
    told = [event(1), event(2), *(event(number, number) for number in range(3, 40))]
    with Receiver() as receiver:

        def script(request: Request) -> bytes:
            if request.id == "evt_1":  # until all others are there
                wait_until(lambda: len(set(receiver.ids)) == len(told) - 1)
            return OK

        receiver.script = script
        with channel(receiver, concurrency=2) as opened:
            assert set(answers(opened.send(told))) == {ACCEPTED}
    assert receiver.ids[-1] == "evt_2"


def test_one_that_takes_longer_than_it_may_is_tried_again_and_others_are_not() -> None:
    told = [event(1), event(2), *(event(number, number) for number in range(3, 40))]
    with Receiver() as receiver:

        def script(request: Request) -> bytes | None:
            slow = request.id == "evt_1" and receiver.ids.count("evt_1") == 1
            return None if slow and receiver.ended.wait(10) else OK

        receiver.script = script
        with channel(receiver, concurrency=2, timeout_seconds=1.0) as opened:
            said = opened.send(told)
            assert said[0].reason == "no answer within 1 s"
            # What follows in its row was not sent: the slow one may still be taken.
            assert answers(said) == [FAILED, UNSENT, *[ACCEPTED] * 37]
            assert answers(opened.send(told[:2])) == [ACCEPTED, ACCEPTED]
    assert [each for each in receiver.ids if each in ("evt_1", "evt_2")] == [
        "evt_1",
        "evt_1",
        "evt_2",
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "it closed the connection without an answer"),
        (b"", "it closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "it closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what it answered is not HTTP/1.1"),
        (b"\x00\x01\x02\x03" * 100, "what it answered is not HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "1"),
    ],
)
def test_what_is_no_answer_may_be_sent_again(answer: bytes | None, reason: str) -> None:
    with Receiver(lambda _: answer) as receiver, channel(receiver) as opened:
        receiver.close_after = 1
        [said] = opened.send([event(1)])
    assert said.outcome is FAILED
    assert reason in said.reason
    assert len(receiver.requests) == 1


def _say(answer: bytes, _: Request) -> bytes:
    return answer


def test_the_status_counts_when_the_body_breaks_off() -> None:
    for status, answer in ((200, ACCEPTED), (422, REFUSED), (500, FAILED)):
        half = b"HTTP/1.1 %d X\r\nContent-Length: 1000\r\n\r\nhalf" % status
        with Receiver() as receiver, channel(receiver) as opened:
            receiver.script = partial(_say, half)
            receiver.close_after = 1
            assert answers(opened.send([event(1)])) == [answer]


def test_a_body_without_an_end_is_not_waited_for() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    with Receiver(lambda _: head) as receiver, channel(receiver, timeout_seconds=600.0) as opened:
        assert answers(opened.send([event(1)])) == [ACCEPTED]


def test_of_a_huge_body_only_its_beginning_is_read() -> None:
    sent = [0]

    def script(request: Request) -> bytes:
        sent[0] += 1
        return reply(400, b"x" * 50_000_000)

    with Receiver(script) as receiver, channel(receiver) as opened:
        [said] = opened.send([event(1)])
        [again] = opened.send([event(2)])
    assert said.outcome is again.outcome is REFUSED
    assert len(said.reason) < 300
    # What is left of it is not read either: the next request has a connection of its own.
    assert receiver.connections == 2


def test_headers_without_an_end_are_not_read_for_ever() -> None:
    endless = b"HTTP/1.1 200 OK\r\n" + b"X-A: x\r\n" * (2 * LONGEST_HEAD // 8)
    with Receiver(lambda _: endless) as receiver, channel(receiver) as opened:
        [said] = opened.send([event(1)])
    assert said.outcome is FAILED
    assert "KB of headers" in said.reason


def test_an_answer_may_end_with_its_connection() -> None:
    with Receiver(lambda _: b"HTTP/1.0 400 X\r\n\r\nno such shop") as receiver:
        receiver.close_after = 1
        with channel(receiver) as opened:
            [said] = opened.send([event(1)])
    assert said.reason == "it answered 400 Bad Request: no such shop"


def test_an_answer_in_chunks_is_an_answer() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    with Receiver(lambda _: chunked) as receiver, channel(receiver) as opened:
        assert answers(opened.send([event(1)])) == [ACCEPTED]
        assert answers(opened.send([event(2)])) == [ACCEPTED]
    assert receiver.connections == 1


def test_an_endpoint_that_speaks_without_being_asked_is_not_believed() -> None:
    with Receiver() as receiver:
        receiver.script = lambda _: reply(500) + OK  # the second is nobody's answer
        with channel(receiver, concurrency=1) as opened:
            assert answers(opened.send([event(1)])) == [FAILED]
            assert answers(opened.send([event(2)])) == [FAILED]


def test_what_follows_an_answer_is_not_the_beginning_of_the_next() -> None:
    begun, rest = b"HTTP/1.1 200 OK\r\n", b"Content-Length: 0\r\n\r\n"
    with Receiver(lambda _: OK + begun) as receiver, channel(receiver) as opened:
        assert answers(opened.send([event(1)])) == [ACCEPTED]
        receiver.script = lambda _: rest
        receiver.close_after = 1
        assert answers(opened.send([event(2)])) == [FAILED]
    assert receiver.connections == 2


# --- nobody there --------------------------------------------------------------------------------


def test_nobody_at_the_port() -> None:
    port = free_port()
    with channel(f"http://127.0.0.1:{port}/t0ken") as opened:
        said = opened.send([event(number, number) for number in range(40)])
    assert set(answers(said)) == {UNREACHABLE}
    assert said[0].reason == f"http://127.0.0.1:{port} cannot be connected to: Connection refused"


def test_a_host_that_nobody_knows() -> None:
    with channel("https://nobody.invalid/") as opened:
        [said] = opened.send([event(1)])
    assert said.outcome is UNREACHABLE
    assert said.reason == "the address of nobody.invalid is not known"


def test_a_connection_that_nobody_accepts_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # there is room for one or two of them
            each.setblocking(False)
            each.connect_ex(address)
        url = f"http://127.0.0.1:{address[1]}/"
        with channel(url, timeout_seconds=0.3) as opened:
            [said] = opened.send([event(1)])
        for each in waiting:
            each.close()
    assert said.outcome is UNREACHABLE
    assert said.reason.endswith("cannot be connected to: no answer")


def test_it_comes_back_and_the_channel_with_it() -> None:
    port = free_port()
    with channel(f"http://127.0.0.1:{port}/") as opened:
        assert answers(opened.send([event(1)])) == [UNREACHABLE]
        with Receiver(port=port):
            assert answers(opened.send([event(1)])) == [ACCEPTED]


# --- TLS -----------------------------------------------------------------------------------------


def test_under_tls_a_trusted_certificate_for_the_host_is_needed(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    with Receiver(tls=made.server) as receiver:
        with channel(receiver, ca_file=str(made.authority)) as opened:
            assert answers(opened.send([event(1), event(2), event(3, 3)])) == [ACCEPTED] * 3
        with channel(receiver) as opened:
            [said] = opened.send([event(4)])
    assert said.outcome is UNREACHABLE
    assert "is not trusted" in said.reason
    assert sorted(receiver.ids) == ["evt_1", "evt_2", "evt_3"]


def test_a_certificate_for_another_host_is_not_trusted(tmp_path: Path) -> None:
    made = certificates(tmp_path, "other.test")
    trusted = {"ca_file": str(made.authority)}
    with Receiver(tls=made.server) as receiver, channel(receiver, **trusted) as opened:
        [said] = opened.send([event(1)])
    assert said.outcome is UNREACHABLE
    assert "is not trusted" in said.reason
    assert receiver.requests == []


def test_one_that_does_not_speak_tls_is_told_apart() -> None:
    with (
        Receiver() as receiver,
        channel(f"https://127.0.0.1:{receiver.port}", timeout_seconds=1.0) as opened,
    ):
        [said] = opened.send([event(1)])
    assert said.outcome is UNREACHABLE


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SinkUnavailable, match=r"ca_file .*missing\.pem cannot be read"):
        sink("https://hooks.example", ca_file=str(tmp_path / "missing.pem")).connect()


# --- nothing secret shows ------------------------------------------------------------------------


def test_no_secret_shows_even_where_the_endpoint_repeats_what_it_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    def echo(request: Request) -> bytes:
        return reply(400, json.dumps(request.headers).encode() + request.line.encode())

    given = {
        "secret": Secret(SECRET),
        "previous_secret": Secret("pr3vious"),
        "headers": {"Authorization": Secret("Bearer t0ken")},
    }
    with Receiver(echo) as receiver:
        url = f"{receiver.url}/p4th?key=qu3ry"
        made = sink(url, **given)
        with channel(url, **given) as opened:
            [said] = opened.send([event(1)])
            shown = f"{made!r} {made} {said} {opened!r} {vars(opened)!r} {caplog.text}"
    for secret in (SECRET, SECRET[6:], "pr3vious", "t0ken", "p4th", "qu3ry"):
        assert secret not in shown
    assert "***" in said.reason
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    "body",
    [
        b"Cannot POST /services/T0SECRETPATH/B0/XXX%2BSECRET",
        b'{"message":"The route services\\/T0SECRETPATH\\/B0\\/XXX+SECRET could not be found."}',
        b"invalid token TOKENSECRET",
        b'bad "token=QSECRET", x=1 and x%3dqsecret',
        b'{"error":"no hook XXX+SECRET of team t0secretpath"}',
        b"bad token\\u003dQSECRET&amp;x=1",
        b"/services/T0SECRETPATH/B0/XXX%2BSECRET?token=QSECRET&x=1",
        b"the hook T0SECRETP... is gone",
        b"signed with another key than k1ngs-secret",
    ],
)
def test_no_part_of_the_url_or_of_a_header_shows_however_it_is_repeated(body: bytes) -> None:
    given = {
        "secret": Secret("whsec_azFuZ3Mtc2VjcmV0"),
        "headers": {"Authorization": Secret("Bearer TOKENSECRET")},
    }
    with Receiver(lambda _: reply(404, body)) as receiver:
        path = "services/T0SECRETPATH/B0/XXX%2BSECRET?token=QSECRET&x=1"
        with channel(f"http://127.0.0.1:{receiver.port}/{path}", **given) as opened:
            [said] = opened.send([event(1)])
    words = set(re.findall(r"[a-z0-9]+", said.reason.removeprefix("it answered 404 ").lower()))
    assert "***" in said.reason
    assert not [word for word in words if "secret" in word or "t0" in word]
    assert not words & {"services", "b0", "1", "xxx", "bearer", "k1ngs"}


def test_words_that_are_nobodys_secret_stay_readable() -> None:
    said_there = b"no v1 table, as of event 11; a key is not it"
    given = {"headers": {"X-A": Secret("a-b")}}
    with (
        Receiver(lambda _: reply(400, said_there)) as receiver,
        channel(f"{receiver.url}/v1?key=qu3ry", **given) as opened,
    ):
        [said] = opened.send([event(1)])
    assert said.reason.endswith(": no *** table, as of event 11; a key is not it")


def test_an_excerpt_is_one_short_line_of_what_can_be_printed() -> None:
    body = b"\x1b[31mfirst\r\n\tsecond\x00 \xff \xe2\x80\xae" + b"x" * 1000
    shown = excerpt(body, SecretMask([Secret("second")]))
    assert shown.startswith("[31mfirst *** \ufffd x")
    assert len(shown) == 200
    assert shown.isprintable()
    assert len(body) < LONGEST_BODY


def test_what_may_come_again_says_nothing_of_the_body() -> None:
    for status in (429, 500):
        said = reply_to(HttpResponse(status, "", b"alice@example.com is odd"), now=NOW)
        assert "alice" not in said.reason


def test_the_time_of_signing_is_that_of_the_attempt() -> None:
    with Receiver(lambda _: reply(500)) as receiver, channel(receiver) as opened:
        opened.send([event(1)])
        first = time.time()
        while int(time.time()) == int(first):
            time.sleep(0.01)  # a signature counts seconds
        opened.send([event(1)])
    one, two = (int(request.headers["webhook-timestamp"]) for request in receiver.requests)
    assert two > one
    assert receiver.ids == ["evt_1", "evt_1"]
