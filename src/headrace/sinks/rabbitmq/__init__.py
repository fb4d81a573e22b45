"""RabbitMQ: AMQP 0-9-1 as bytes, a session on a connection, and the channel."""

from ...errors import ConfigError

try:
    import pamqp  # noqa: F401  # all of this folder needs it
except ModuleNotFoundError as error:
    raise ConfigError(
        "a sink of type rabbitmq needs pamqp: pip install 'headrace[rabbitmq]'"
    ) from error

from .sink import Rabbitmq as Rabbitmq
