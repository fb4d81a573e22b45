"""Placeholder."""


def attach() -> None:
    """Placeholder."""
