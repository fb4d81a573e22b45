"""Catalogs: where people look tables up by name. This is the contract; a catalog is a module.

A catalog is a frozen Struct whose fields are the settings below a sink's `catalog`. An entry is
made from what the Delta table says of itself, so whatever changes columns or comments there changes
them in the catalog.
"""

from .entry import CatalogEntry, EntryName, TableCatalog, check_catalog
from .glue import GlueCatalog
from .registrar import Registrar
from .spark import SparkCatalog
from .unity import UnityCatalog

# What a sink may have as `catalog`; `type` says which.
AnyCatalog = UnityCatalog | GlueCatalog | SparkCatalog

__all__ = [
    "AnyCatalog",
    "CatalogEntry",
    "EntryName",
    "GlueCatalog",
    "Registrar",
    "SparkCatalog",
    "TableCatalog",
    "UnityCatalog",
    "check_catalog",
]
