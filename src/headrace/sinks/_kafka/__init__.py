"""Kafka: what topics and keys are called, and the producer."""
