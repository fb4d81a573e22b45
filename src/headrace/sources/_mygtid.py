"""GTIDs of MySQL and of MariaDB: single ones, sets with gaps, their text and bytes. No I/O."""

from __future__ import annotations

import msgspec


class MysqlGtid(msgspec.Struct, frozen=True):
    """A transaction of MySQL: 3e11fa47-71ca-11e1-9e33-c80aa9429562:23, or with a tag."""

    source: str  # the uuid of the server that committed it first
    number: int
    tag: str = ""

    def __str__(self) -> str:
        raise NotImplementedError


class MysqlGtids:
    """A set of MySQL's transactions; immutable, and gaps are kept."""

    @classmethod
    def parse(cls, text: str) -> MysqlGtids:
        """From gtid_executed's text; DecodeError where it is not one."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError

    def __contains__(self, gtid: MysqlGtid) -> bool:
        raise NotImplementedError

    def __or__(self, other: MysqlGtids) -> MysqlGtids:
        raise NotImplementedError

    def __sub__(self, other: MysqlGtids) -> MysqlGtids:
        raise NotImplementedError

    def __le__(self, other: MysqlGtids) -> bool:
        raise NotImplementedError

    def add(self, gtid: MysqlGtid) -> MysqlGtids:
        """A set with one more."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """As COM_BINLOG_DUMP_GTID sends it."""
        raise NotImplementedError


class MariadbGtid(msgspec.Struct, frozen=True):
    """A transaction of MariaDB: domain-server-sequence, 0-1-42."""

    domain: int
    server: int
    sequence: int

    def __str__(self) -> str:
        raise NotImplementedError


class MariadbGtids:
    """MariaDB's position: the last transaction of each domain; immutable."""

    @classmethod
    def parse(cls, text: str) -> MariadbGtids:
        """From gtid_binlog_pos's text; DecodeError where it is not one."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError

    def __contains__(self, gtid: MariadbGtid) -> bool:
        """Whether a domain has come at least as far as this transaction."""
        raise NotImplementedError

    def __or__(self, other: MariadbGtids) -> MariadbGtids:
        raise NotImplementedError

    def __le__(self, other: MariadbGtids) -> bool:
        raise NotImplementedError

    def add(self, gtid: MariadbGtid) -> MariadbGtids:
        """The position after one more transaction."""
        raise NotImplementedError
