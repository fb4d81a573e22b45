"""Kafka: what topics and keys are called, and the producer."""

from .sink import Kafka as Kafka
