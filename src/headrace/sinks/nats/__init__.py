"""NATS: its protocol as bytes, a session on a connection, JetStream's streams, and the channel."""

from .sink import Nats as Nats
