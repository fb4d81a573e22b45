"""Events sent to Kafka by one idempotent producer.

The client itself retries, in order and without repeats, until a window times out. When a window
is given up (the brokers are gone, or take too long) the producer is purged and closed, so that
nothing of it arrives later, behind what is sent anew.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...errors import ConfigError, SinkUnavailable
from ...secret import MASK
from ..push import ACCEPTED, UNSENT, DeliveryOutcome, Event, OperationNames, Reply, Routes, Template
from ..push.wire import LOOK
from . import names

try:
    from confluent_kafka import KafkaError, KafkaException, Message, Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic
except ModuleNotFoundError as error:
    raise ConfigError(
        "a sink of type kafka needs confluent-kafka: pip install 'headrace[kafka]'"
    ) from error

_GONE_SECONDS = 5.0  # a broker that restarts is waited for within one window
_LOOK_SECONDS = 0.1
_EMPTY_SECONDS = 10.0
_SMALLEST_BATCH = 1_000

_PROPERTY = re.compile(r'property:? "(?P<name>[^"]+)"')
# Headers that many events share.
_OPERATIONS = OperationNames(lambda name: ("savegress-operation", name))

# Brokers return these for a batch as a whole, so each of its events is tried alone.
_TOO_LARGE = frozenset(
    {
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
_UNFIT = frozenset(
    {
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
    }
)
_OF_A_BATCH = _TOO_LARGE | _UNFIT | {KafkaError._INVALID_DIFFERENT_RECORD}
# What no later attempt changes, as long as the event and the topic are what they are.
_REFUSED = _TOO_LARGE | _UNFIT | {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION}
# A login concerns the whole cluster: every event would fail, so nothing is put aside.
_DENIED = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    }
)
_GONE = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TRANSPORT})
_NO_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
_EMPTIED = frozenset({KafkaError._PURGE_INFLIGHT, KafkaError._PURGE_QUEUE})


@dataclass(frozen=True, slots=True)
class TopicCreation:
    """How a topic is made that is not there."""

    partitions: int  # -1: as many as the brokers make by themselves
    replication: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaLink:
    """The client's settings, and what the channel needs beside them."""

    client: Mapping[str, Any] = field(repr=False)
    template: Template
    with_schema: bool
    timeout: float
    creation: TopicCreation | None
    secrets: tuple[str, ...] = field(repr=False)  # the longest first

    def reason(self, error: KafkaError) -> str:
        """What went wrong, without a secret."""
        text: str = error.str() or error.name()
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text


class _BrokerErrors:
    """The errors that the client reports of its brokers, at any time."""

    def __init__(self) -> None:
        self.fatal: KafkaError | None = None
        self.denied: KafkaError | None = None
        self.gone: KafkaError | None = None
        self.all_gone = False
        self._since = 0.0

    def __call__(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal = error
        elif error.code() in _DENIED:
            self.denied = error
        elif error.code() in _GONE:
            self.all_gone |= error.code() == KafkaError._ALL_BROKERS_DOWN
            # Why one broker is not reached says more than that none is.
            if self.gone is None:
                self._since = time.monotonic()
            if self.gone is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
                self.gone = error

    @property
    def hopeless(self) -> bool:
        """Whether there is no use in waiting on."""
        if self.fatal or self.denied:
            return True
        return self.gone is not None and time.monotonic() - self._since > _GONE_SECONDS

    @property
    def error(self) -> KafkaError | None:
        """The most specific one."""
        return self.fatal or self.denied or self.gone

    def clear(self) -> None:
        """A broker has replied since."""
        self.denied = self.gone = None
        self.all_gone = False


class _Window:
    """What became of the events of one call: all are accepted but those that failed."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.failed: dict[int, KafkaError | Reply] = {}

    def fail(self, at: int, error: KafkaError, _message: Message) -> None:
        """The client reports that an event failed."""
        self.failed[at] = error


class _Route(NamedTuple):
    """What the events of a table share."""

    topic: str
    begin: int  # of the key within a row
    table: tuple[str, str]  # a header


class KafkaChannel:
    """Kafka, from one of Spark's Python processes."""

    def __init__(self, link: KafkaLink) -> None:
        self._link = link
        self._route = Routes(self._new_route)
        self._created: set[str] = set()
        self._absent: set[str] = set()
        self._batch_size = int(link.client["batch.size"])
        self._errors = _BrokerErrors()
        self._producer: Producer | None = None
        self._open()

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over some events, in order, and wait until brokers have them all."""
        window = _Window(events)
        deadline = time.monotonic() + self._link.timeout
        try:
            producer = self._producer or self._open()
        except SinkUnavailable as error:
            return [Reply(DeliveryOutcome.UNREACHABLE, str(error))] * len(events)
        refused = self._create_topics(events)
        self._look_again(producer)
        self._produce(producer, window, refused, deadline)
        self._finish(producer, window, deadline)
        if not window.failed:
            return [ACCEPTED] * len(events)
        self._one_by_one(window)
        return self._replies(window)

    def close(self) -> None:
        """Close the producer; what it still holds was not accepted and is dropped."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(_LOOK_SECONDS)

    # --- the producer ----------------------------------------------------------------------------

    def _open(self) -> Producer:
        """A new producer, once a broker has answered it."""
        self.close()
        self._errors = errors = _BrokerErrors()
        given = {**self._link.client, "batch.size": self._batch_size, "error_cb": errors}
        try:
            producer = Producer(given)
        except KafkaException as error:  # such as a certificate that is not there
            raise self._unavailable(error.args[0]) from None
        deadline = time.monotonic() + self._link.timeout
        while not _replies_to(producer):
            producer.poll(0)
            ended = errors.fatal or errors.denied or errors.all_gone
            if ended or time.monotonic() > deadline:
                raise self._unavailable(errors.error)
        errors.clear()
        self._producer = producer
        return producer

    def _unavailable(self, error: KafkaError | None) -> SinkUnavailable:
        unheard = f"no answer in {self._link.timeout:g} s; {LOOK}"
        why = self._link.reason(error) if error else unheard
        return SinkUnavailable(f"Kafka at {self._link.client['bootstrap.servers']}: {why}")

    def _give_up(self, producer: Producer, window: _Window) -> None:
        """Purge what was not accepted, and abandon the producer."""
        self._producer = None
        producer.purge()
        if producer.flush(_EMPTY_SECONDS):
            # It is not known which ones it still has, so none of them counts as accepted.
            stuck = self._stuck()
            for at in range(len(window.events)):
                window.failed.setdefault(at, stuck)

    # --- a window --------------------------------------------------------------------------------

    def _produce(
        self,
        producer: Producer,
        window: _Window,
        refused: Mapping[str, Reply],
        deadline: float,
    ) -> None:
        blocked: set[str] = set()
        for at, event in enumerate(window.events):
            if blocked and event.row in blocked:
                window.failed[at] = UNSENT
            elif refused and (topic := self._route(event).topic) in refused:
                window.failed[at] = refused[topic]
                blocked.add(event.row)
            elif not self._hand_over(producer, window, at, deadline):
                blocked.add(event.row)

    def _hand_over(self, producer: Producer, window: _Window, at: int, deadline: float) -> bool:
        event = window.events[at]
        topic, begin, table = self._route(event)
        key, failed = event.row[begin:], partial(window.fail, at)
        if not event.key and not key.endswith(":"):
            key += ":"  # a TRUNCATE or a SCHEMA, which is of all rows
        headers: list[tuple[str, str | bytes | None]] = [
            ("savegress-event-id", event.id),
            _OPERATIONS[event.op],
            table,
            ("savegress-timestamp", str(event.commit_time // 1000)),
        ]
        while True:
            try:
                producer.produce(topic, event.payload, key, on_delivery=failed, headers=headers)
            except BufferError:  # the client holds as much as it may: see what it got rid of
                producer.poll(_LOOK_SECONDS)
                if self._errors.hopeless or time.monotonic() > deadline:
                    window.failed[at] = self._stuck()
                    return False
            except KafkaException as error:
                window.failed[at] = error.args[0]
                return False
            else:
                return True

    def _finish(self, producer: Producer, window: _Window, deadline: float) -> None:
        """Wait until every event has a reply, or the brokers are gone."""
        errors = self._errors
        before, known = len(producer), errors.error
        while left := producer.flush(_LOOK_SECONDS):
            # Events accepted before a broker was lost say nothing of now, and the client reports a
            # loss only once.
            if left < before and errors.error is known:
                errors.clear()
            before, known = left, errors.error
            if errors.hopeless or time.monotonic() > deadline:
                self._give_up(producer, window)
                break
        if errors.fatal:
            self._producer = None

    def _one_by_one(self, window: _Window) -> None:
        """Find the event that brokers refused where they refused a batch that it was part of.

        The row's later events may have been taken already; they follow once more, in order.
        """
        again = _rows_from(window, _OF_A_BATCH)
        large = {window.events[at].row for at in _rows_from(window, _TOO_LARGE)}
        blocked: set[str] = set()
        for at in again:
            window.failed.pop(at, None)
            row = window.events[at].row
            if row in blocked or (producer := self._producer) is None:
                window.failed[at] = UNSENT if row in blocked else self._stuck()
                continue
            deadline = time.monotonic() + self._link.timeout
            if self._hand_over(producer, window, at, deadline):
                self._finish(producer, window, deadline)
            if at in window.failed:
                blocked.add(row)
        if large - blocked:
            # Some fit by themselves, so it was the batch that was too large.
            self._batch_size = max(_SMALLEST_BATCH, self._batch_size // 2)
            self.close()

    # --- replies --------------------------------------------------------------------------------

    def _replies(self, window: _Window) -> list[Reply]:
        replies = [ACCEPTED] * len(window.events)
        for at, failed in window.failed.items():
            if isinstance(failed, Reply):
                replies[at] = failed
            else:
                replies[at] = self._reply(failed, self._route(window.events[at]).topic)
        return replies

    def _reply(self, error: KafkaError, topic: str) -> Reply:
        code = error.code()
        if code in _EMPTIED:
            return self._stuck()
        if code in _NO_TOPIC:
            self._created.discard(topic)
            self._absent.add(topic)
            return Reply(
                DeliveryOutcome.FAILED,
                f"there is no topic {topic}, and the brokers make none; create it, "
                "or set create_topics",
            )
        reason = f"topic {topic}: {self._link.reason(error)}"
        if code in _REFUSED:
            return Reply(DeliveryOutcome.REFUSED, reason)
        if code in _GONE or code in _DENIED:
            return Reply(DeliveryOutcome.UNREACHABLE, reason)
        return Reply(DeliveryOutcome.FAILED, reason)

    def _stuck(self) -> Reply:
        """The reply for an event that was purged."""
        errors = self._errors
        if errors.fatal or errors.error is None:
            why = self._link.reason(errors.fatal) if errors.fatal else "the brokers are slow"
            return Reply(DeliveryOutcome.FAILED, f"not accepted in {self._link.timeout:g} s: {why}")
        return Reply(DeliveryOutcome.UNREACHABLE, str(self._unavailable(errors.error)))

    # --- topics ----------------------------------------------------------------------------------

    def _new_route(self, event: Event) -> _Route:
        topic = names.topic(self._link.template, event.source, event.schema, event.table)
        begin = names.key_begins(event, with_schema=self._link.with_schema)
        return _Route(topic, begin, ("savegress-table", event.table))

    def _look_again(self, producer: Producer) -> None:
        """Refresh metadata: the client remembers for minutes that a topic was missing."""
        while self._absent:
            try:
                producer.list_topics(self._absent.pop(), timeout=self._link.timeout)
            except KafkaException:  # then the events say what is wrong
                return

    def _create_topics(self, events: Iterable[Event]) -> dict[str, Reply]:
        """Create missing topics, if create_topics is set; returns a reply for each that failed."""
        creation = self._link.creation
        if creation is None:
            return {}
        new = {self._route(event).topic for event in events} - self._created
        if not new:
            return {}
        admin = AdminClient(dict(self._link.client))
        wanted = [
            NewTopic(
                name, creation.partitions, creation.replication, config=dict(creation.settings)
            )
            for name in sorted(new)
        ]
        timeout = self._link.timeout
        created = admin.create_topics(wanted, operation_timeout=timeout, request_timeout=timeout)
        failed = {name: error for name, future in created.items() if (error := _failure(future))}
        self._created |= new - failed.keys()
        return {name: self._reply(error, name) for name, error in failed.items()}


def objection(client: Mapping[str, Any]) -> str:
    """Why librdkafka rejects its settings, without a value, which may be secret; "": it does not.

    Without a broker's address it connects to nobody, and files may be on other machines only.
    """
    given = {k: v for k, v in client.items() if not k.startswith(("bootstrap.", "ssl."))}
    try:
        Producer(given)
    except KafkaException as error:
        text = error.args[0].str()
    except (TypeError, ValueError):
        return "librdkafka takes text, numbers, and true or false"
    else:
        return ""
    found = _PROPERTY.search(text)
    if found is None:
        return "librdkafka does not take them together"
    if text.startswith("No such"):
        return f"librdkafka has no setting called {found['name']}"
    return f"the value of {found['name']} does not do for librdkafka"


def _replies_to(producer: Producer) -> bool:
    """Whether a broker has sent the id of its cluster."""
    try:
        return bool(producer.cluster_id(_LOOK_SECONDS))
    except KafkaException:
        return False


def _failure(future: Future[None]) -> KafkaError | None:
    """Why a topic could not be made; None: it is there."""
    try:
        future.result()
    except KafkaException as error:
        failure: KafkaError = error.args[0]
        return None if failure.code() == KafkaError.TOPIC_ALREADY_EXISTS else failure
    return None


def _rows_from(window: _Window, codes: Collection[int]) -> list[int]:
    """The places of the events of a row from the first that failed so on, in order."""
    rows: set[str] = set()
    places = []
    for at, event in enumerate(window.events):
        failed = window.failed.get(at)
        if isinstance(failed, KafkaError) and failed.code() in codes:
            rows.add(event.row)
        if event.row in rows:
            places.append(at)
    return places
