"""What may be done to the rows of a table on their way to a sink: `select`, `where`, `mask`.

TableTransform    as the config has it
Selected          the same for the columns of one version of a table
"""

from .rules import Mask, TableTransform, Transforms

__all__ = ["Mask", "TableTransform", "Transforms"]
