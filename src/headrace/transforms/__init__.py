"""What may be done to the rows of a table on their way to a sink."""

from .rules import Mask, TableTransform, Transforms

__all__ = ["Mask", "TableTransform", "Transforms"]
