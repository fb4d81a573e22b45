"""Where a change stands in the binary log of MySQL or MariaDB."""

from ...change.event import Position


class MysqlPosition(Position, frozen=True, gc=False, tag="mysql"):
    """Where a change stands in the binary log of MySQL or MariaDB."""

    file: str  # mysql-bin.000001
    position: int  # where the change's event begins in the file
    gtid: str = ""  # the transaction's; "": the server gives none
    begin: int = 0  # where the transaction begins in the file

    @property
    def commit(self) -> int:
        """A number that orders transactions of one server."""
        return self._number << 40 | self.begin

    @property
    def own(self) -> int:
        return self._number << 40 | self.position

    @property
    def _number(self) -> int:
        number = self.file.rpartition(".")[2]
        return int(number) if number.isdecimal() else 0
