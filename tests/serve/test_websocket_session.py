"""The conversation alone: messages in, messages out, and a clock that the test moves."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import WebSocketSection
from headrace.serve.ws.messages import Confirmed, Rejected, parse
from headrace.serve.ws.session import (
    MESSAGES_AT_ONCE,
    Act,
    CheckKey,
    CloseConnection,
    OpenSubscription,
    PauseReading,
    SendMessage,
    SendStatus,
    SessionClock,
    WebSocketSession,
)

CONFIRMED = Confirmed(id="sub_1", tables=("orders",), sequence=5, epoch="e", generation="0")


class Conversation:
    """A session and its clock."""

    def __init__(self, *, admitted: bool = True) -> None:
        self.now = 1000.0
        clock = SessionClock(lambda: self.now, lambda: int(self.now * 1_000_000))
        self.session = WebSocketSession(WebSocketSection(), clock)
        if admitted:
            self.session.admit()

    def say(self, **message: Any) -> list[Act]:
        return self.session.receive(json.dumps(message))

    def answer(self, **message: Any) -> dict[str, Any]:
        (act,) = self.say(**message)
        return said(act)

    def elapse(self, seconds: float, sent: int | None = None) -> list[Act]:
        self.now += seconds
        return self.session.elapse(sent)

    def ping(self, sent: int | None = None) -> str:
        """Wait for a ping; returns its time."""
        acts = self.elapse(self.session.next_at - self.now, sent)
        return str(next(said(act)["timestamp"] for act in acts if isinstance(act, SendMessage)))


def said(act: Act) -> dict[str, Any]:
    assert isinstance(act, SendMessage)
    message: dict[str, Any] = json.loads(act.message)
    return message


# --- who it is -----------------------------------------------------------------------------------


@pytest.mark.requirement("S3-03")
def test_auth_is_checked_and_its_key_never_shown() -> None:
    (act,) = Conversation(admitted=False).say(type="auth", apiKey="cdc_" + "a" * 64)
    assert isinstance(act, CheckKey)
    assert act.auth.api_key == "cdc_" + "a" * 64
    assert act.auth.well_formed
    assert "aaa" not in repr(act)


@pytest.mark.requirement("S3-19", "S3-26")
@pytest.mark.parametrize(
    "message",
    [
        {"type": "subscribe", "tables": ["orders"]},
        {"type": "pong", "timestamp": "now"},
        {"type": "protocol_version", "requestedVersion": 1, "supportedVersions": [1]},
    ],
)
def test_nothing_may_come_before_auth(message: dict[str, Any]) -> None:
    answer = Conversation(admitted=False).answer(**message)
    assert (answer["type"], answer["error"]) == ("error", "unauthenticated")


@pytest.mark.requirement("S3-22")
def test_a_second_auth_is_no_operation_there_is() -> None:
    answer = Conversation().answer(type="auth", apiKey="cdc_" + "a" * 64)
    assert answer["error"] == "invalid_operation"


@pytest.mark.requirement("S3-19", "S3-26")
def test_who_says_nothing_for_ten_seconds_must_go() -> None:
    conversation = Conversation(admitted=False)
    assert conversation.session.next_at == conversation.now + 10
    assert conversation.elapse(9.9) == []
    error, close = conversation.elapse(0.1)
    assert said(error)["error"] == "unauthenticated"
    assert isinstance(close, CloseConnection)


@pytest.mark.requirement("S3-05")
def test_a_refused_key_is_answered_and_the_connection_closed() -> None:
    failure, close = Conversation(admitted=False).session.deny()
    assert said(failure) == {
        "type": "auth_failure",
        "error": "invalid_api_key",
        "message": "The provided API key is invalid or has expired",
        "timestamp": "1970-01-01T00:16:40.000000Z",
    }
    assert isinstance(close, CloseConnection)


# --- what it says --------------------------------------------------------------------------------

MALFORMED = [
    "",
    "hello",
    "{",
    "[]",
    "null",
    "1",
    "{}",
    '{"type": 1}',
    '{"type": null}',
    '{"tables": ["orders"]}',
    '{"type": "auth"}',
    '{"type": "auth", "apiKey": 1}',
    '{"type": "subscribe"}',
    '{"type": "subscribe", "tables": []}',
    '{"type": "subscribe", "tables": "orders"}',
    '{"type": "subscribe", "tables": [""]}',
    '{"type": "subscribe", "tables": [1]}',
    '{"type": "subscribe", "tables": ["orders"], "resume": 1}',
    '{"type": "subscribe", "tables": ["orders"], "resume": {"lastSequence": -1}}',
    '{"type": "subscribe", "tables": ["orders"], "resume": {"lastSequence": 1e300}}',
    '{"type": "pong"}',
    '{"type": "protocol_version"}',
    json.dumps({"type": "subscribe", "tables": [f"t{n}" for n in range(101)]}),
    json.dumps({"type": "subscribe", "tables": ["t" * 257]}),
    "[" * 60_000,
    '{"type": "subscribe", "tables": ["a"], "x": ' + "[" * 20_000 + "]" * 20_000 + "}",
    '{"type": "auth", "apiKey": "\ud800"}',
]


@pytest.mark.requirement("S3-02", "S3-06", "S3-17", "S3-18")
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_message_is_refused_and_the_conversation_goes_on(text: str) -> None:
    conversation = Conversation()
    (act,) = conversation.session.receive(text)
    error = said(act)
    assert (error["type"], error["error"]) == ("error", "invalid_message")
    assert error["message"]
    assert error["requestId"].startswith("req_")
    (opened,) = conversation.say(type="subscribe", tables=["orders"])
    assert isinstance(opened, OpenSubscription)


@pytest.mark.requirement("S3-06")
def test_from_one_table_to_a_hundred() -> None:
    for count in (1, 100):
        tables = [f"t{n}" for n in range(count)]
        (act,) = Conversation().say(type="subscribe", tables=tables)
        assert isinstance(act, OpenSubscription)
        assert act.wanted.tables == tables


@pytest.mark.requirement("S3-22")
@pytest.mark.parametrize("type", ["unsubscribe", "ping", "cdc_event", "", "AUTH", "x" * 5000])
def test_an_unknown_type_is_no_operation(type: str) -> None:
    error = Conversation().answer(type=type)
    assert error["error"] == "invalid_operation"
    assert len(error["message"]) < 300


@pytest.mark.requirement("S3-37")
def test_unknown_fields_are_passed_over() -> None:
    (act,) = Conversation().say(
        type="subscribe", tables=["orders"], colour="blue", resume={"lastSequence": 1, "x": []}
    )
    assert isinstance(act, OpenSubscription)
    assert act.wanted.resume is not None
    assert act.wanted.resume.last_sequence == 1


@pytest.mark.requirement("S3-02", "S3-18")
def test_binary_frames_are_refused() -> None:
    (act,) = Conversation().session.receive(b'{"type":"subscribe","tables":["orders"]}')
    assert said(act)["error"] == "invalid_message"


@given(st.text(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "tables", "resume", "apiKey", "timestamp", "x"]), inner, max_size=4
    ),
).map(json.dumps))  # fmt: skip
def test_whatever_comes_is_understood_or_rejected(text: str) -> None:
    with suppress(Rejected):
        parse(text)


@pytest.mark.requirement("S3-25")
def test_who_says_too_much_is_told_and_waits() -> None:
    conversation = Conversation()
    for _ in range(MESSAGES_AT_ONCE):
        assert conversation.say(type="pong", timestamp="now") == []
    error, wait = conversation.say(type="subscribe", tables=["orders"])
    assert said(error)["error"] == "rate_limited"
    assert isinstance(wait, PauseReading)
    conversation.now += wait.seconds
    (act,) = conversation.say(type="subscribe", tables=["orders"])
    assert isinstance(act, OpenSubscription)


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-36", "S3-39")
@pytest.mark.parametrize(("requested", "supported"), [(2, [1, 2]), (1, [1]), (1, []), (9, [3, 1])])
def test_both_sides_agree_on_the_version_they_share(requested: int, supported: list[int]) -> None:
    answer = Conversation().answer(
        type="protocol_version", requestedVersion=requested, supportedVersions=supported
    )
    assert answer == {
        "type": "protocol_version",
        "requestedVersion": requested,
        "supportedVersions": [1],
        "version": 1,
        "protocolVersion": "1.0.0",
    }


@pytest.mark.requirement("S3-39")
def test_a_client_of_other_versions_is_told_which_there_are() -> None:
    error = Conversation().answer(
        type="protocol_version", requestedVersion=2, supportedVersions=[2, 3]
    )
    assert error["error"] == "invalid_operation"
    assert error["details"] == {"supportedVersions": [1]}


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-13")
def test_a_ping_comes_every_thirty_seconds() -> None:
    conversation = Conversation()
    assert conversation.session.next_at == conversation.now + 30
    assert conversation.elapse(29.9) == []
    for _ in range(5):
        acts = conversation.elapse(0.1)
        pings = [said(act) for act in acts if isinstance(act, SendMessage)]
        assert [ping["type"] for ping in pings] == ["ping"]
        conversation.say(type="pong", timestamp=pings[0]["timestamp"])
        assert conversation.elapse(29.9) == []


@pytest.mark.requirement("S3-14", "S3-15")
def test_who_answers_no_ping_for_sixty_seconds_must_go() -> None:
    conversation = Conversation()
    conversation.ping()
    conversation.elapse(59.9)
    assert not [act for act in conversation.elapse(0) if isinstance(act, CloseConnection)]
    (close,) = conversation.elapse(0.1)
    assert isinstance(close, CloseConnection)


@pytest.mark.requirement("S3-14", "S3-15")
def test_a_late_answer_to_an_earlier_ping_leaves_the_later_one_open() -> None:
    conversation = Conversation()
    first = conversation.ping()
    conversation.ping()
    assert conversation.say(type="pong", timestamp=first) == []
    assert [act for act in conversation.elapse(59) if isinstance(act, CloseConnection)] == []
    (close,) = conversation.elapse(1)
    assert isinstance(close, CloseConnection)


@pytest.mark.requirement("S3-14")
def test_a_pong_with_a_time_of_its_own_answers_too() -> None:
    conversation = Conversation()
    conversation.ping(sent=7)
    conversation.say(type="pong", timestamp="2025-11-08T10:30:00Z")
    assert [act for act in conversation.elapse(60) if isinstance(act, CloseConnection)] == []
    assert conversation.session.received is None  # nobody knows which ping it has seen


def test_a_pong_proves_what_was_sent_before_its_ping() -> None:
    conversation = Conversation()
    conversation.session.confirm(CONFIRMED)
    first, _ = conversation.ping(sent=7), conversation.ping(sent=9)
    conversation.say(type="pong", timestamp=first)
    assert conversation.session.received == 7


def test_a_pong_proves_nothing_of_a_subscription_that_came_after_its_ping() -> None:
    conversation = Conversation()
    ping = conversation.ping(sent=7)
    conversation.session.confirm(CONFIRMED)
    conversation.say(type="pong", timestamp=ping)
    assert conversation.session.received is None


@pytest.mark.requirement("S3-16")
def test_the_status_comes_every_thirty_seconds() -> None:
    conversation = Conversation()
    reports = []
    for _ in range(4):
        acts = conversation.elapse(30)
        conversation.say(type="pong", timestamp="now")
        reports.append([act for act in acts if isinstance(act, SendStatus)])
    assert [len(report) for report in reports] == [1, 1, 1, 1]


@pytest.mark.requirement("S3-16", "C-20")
@pytest.mark.parametrize(
    ("queued", "status"),
    [
        (0, "healthy"),
        (999, "healthy"),
        (1000, "degraded"),
        (9999, "degraded"),
        (10_000, "critical"),
    ],
)
def test_the_status_follows_from_what_waits(queued: int, status: str) -> None:
    conversation = Conversation()
    conversation.now += 3600.9
    report = conversation.session.status(queued=queued, tables=2, sequence=40)
    assert said(report) == {
        "type": "connection_status",
        "status": status,
        "queuedEventsCount": queued,
        "activeSubscriptions": 2,
        "uptime": 3600,
        "timestamp": "1970-01-01T01:16:40.900000Z",
        "sequence": 40,
    }
