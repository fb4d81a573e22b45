"""Bytes and texts of MySQL and MariaDB -> events, rows and JSON. Nothing here does I/O."""
