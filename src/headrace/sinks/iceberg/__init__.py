"""Iceberg tables in a REST catalog, to which every change is appended once."""

from .sink import IcebergHistory as IcebergHistory
