"""The settings of a PostgreSQL source."""

from dataclasses import dataclass

from ..secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """What the config says, and the names that follow from it."""

    name: str
    url: Secret
    tables: tuple[str, ...] = ("public.*",)
    slot: str = ""  # "": headrace_<name>
    publication: str = ""  # "": headrace_<name>
    ddl: bool = False  # whether to install the event trigger that tells DDL
    snapshot: bool = True  # whether to copy the rows that are there already
    copy_workers: int = 2
    heartbeat_seconds: float = 60.0

    @property
    def slot_name(self) -> str:
        """The slot's name on the server."""
        return self.slot or f"headrace_{self.name}"

    @property
    def publication_name(self) -> str:
        """The publication's name on the server."""
        return self.publication or f"headrace_{self.name}"

    @property
    def application(self) -> str:
        """What pg_stat_activity shows."""
        return f"headrace {self.name}"
