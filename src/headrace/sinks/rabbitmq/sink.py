"""RabbitMQ: events to an exchange, with the table in the routing key.

    a window ─▶ persistent, mandatory messages on one channel ─▶ a confirm for each ─▶ accepted

Messages of one channel are in a queue in the order they were published in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from ...errors import ConfigError
from ..push import BrokerSettings, Template
from .channel import LONGEST_EXCHANGE, Addresses, ExchangeType, RabbitmqChannel
from .session import PORT, TLS_PORT, AmqpLogin

_EXCHANGE = Template("cdc")
_ROUTING_KEY = Template("${schema}.${table}")
_NO_QUEUE = Template("")
_UNFIT = re.compile(r"[^a-zA-Z0-9_.:@#,/+ -]")
_NOT_ASCII = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rabbitmq(BrokerSettings):
    """Events to exchanges of RabbitMQ, or another server of AMQP 0-9-1 with confirms."""

    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType({"pamqp": "pamqp"})

    username: str = "guest"
    virtual_host: str = "/"
    exchange: Template = _EXCHANGE  # "": the default one, whose routing keys are queues' names
    routing_key: Template = _ROUTING_KEY
    declare_exchange: ExchangeType = ""  # make a durable one of this type; "": it is there
    declare_queue: Template = _NO_QUEUE  # make a durable queue and bind it; "": none
    queue_arguments: Mapping[str, str | int | bool] = field(default_factory=dict)
    content_type: str = ""  # what messages say that they hold; "": what the format writes

    batch_size: int = 2_000
    batch_bytes: int = 4_000_000
    max_event_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        BrokerSettings.__post_init__(self)
        self.hosts(TLS_PORT if self.tls else PORT)
        if not self.exchange.text and self.declare_exchange:
            raise ConfigError(
                "declare_exchange: the default exchange is always there; name another"
            )
        if self.queue_arguments and not self.declare_queue.text:
            raise ConfigError("queue_arguments are not used without declare_queue")
        if not self.exchange.text and not self.routing_key.text:
            raise ConfigError("routing_key: the default exchange needs the name of a queue")

        unfit = {"exchange": _UNFIT, "declare_queue": _UNFIT, "routing_key": _NOT_ASCII}
        for name, pattern in unfit.items():
            if bad := pattern.search(getattr(self, name).plain):
                raise ConfigError(f"{name}: {getattr(self, name)} has {bad[0]!r} in it")
        if len(self.exchange.plain) > LONGEST_EXCHANGE:
            raise ConfigError(f"exchange: a name has at most {LONGEST_EXCHANGE} characters")

    def connect(self) -> RabbitmqChannel:
        """Open a connection, or raise SinkUnavailable."""
        addresses = Addresses(
            exchange=self.exchange,
            routing_key=self.routing_key,
            declare_exchange=self.declare_exchange,
            declare_queue=self.declare_queue,
            queue_arguments=dict(self.queue_arguments),
            content_type=self.content_type or self.formats.named(self.format).media_type,
        )
        return RabbitmqChannel(AmqpLogin(self, self.virtual_host), addresses)
