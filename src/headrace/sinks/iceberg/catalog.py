"""The REST catalog of Iceberg tables: how it is reached, and what its failures mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.rest.auth import AUTH_MANAGER
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    OAuthError,
    RESTError,
    UnauthorizedError,
)
from pyiceberg.io import S3_SIGNER, FileIO, load_file_io
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    TableRequirement,
    TableUpdate,
)
from requests.exceptions import RequestException

from ...errors import SinkRefused, SinkUnavailable
from ..lake.refusal import refusal

_PERMISSION = (UnauthorizedError, ForbiddenError, OAuthError)
# An expired token is renewed, and what another writer has just changed is read again.
_LATER = (
    AuthorizationExpiredError,
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    RESTError,
    RequestException,
    OSError,
)
_CATALOG_LOGIN = ("credential", "token", "auth", AUTH_MANAGER)
_SECRET_OPTIONS = ("secret", "token", "password", "credential", "key")


class HistoryCatalog(RestCatalog):
    """A REST catalog in which a commit is of one snapshot, and which knows its own commits.

    Every commit requires that the table has no newer snapshot than the copy that it was made from:
    a change of columns or properties too, so whoever takes a table over with a snapshot stops all.

    Pyiceberg deletes the manifests of a commit that was refused. But a proxy may send a request
    twice: then the second is refused because the first was done.
    """

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Commit; CommitFailedException: nothing of it was done."""
        if not any(isinstance(each, AssertRefSnapshotId) for each in requirements):
            main = table.metadata.refs.get(MAIN_BRANCH)
            seen = {"ref": MAIN_BRANCH, "snapshot-id": main and main.snapshot_id}
            newest = AssertRefSnapshotId.model_validate(seen)
            requirements = (*requirements, newest)
        try:
            response: CommitTableResponse = super().commit_table(table, requirements, updates)
            return response
        except CommitFailedException:
            added = [
                one.snapshot.snapshot_id for one in updates if isinstance(one, AddSnapshotUpdate)
            ]
            found = self.load_table(table.name())
            if not added or any(found.snapshot_by_id(each) is None for each in added):
                raise
            return CommitTableResponse.model_validate(
                {"metadata": found.metadata, "metadata-location": found.metadata_location}
            )


def storage_only(table: Table) -> FileIO:
    """The storage of a table without the login of the catalog, which tasks have no use for.

    But a catalog that signs each request to the storage wants it with each.
    """
    given = table.io.properties
    if S3_SIGNER in given:
        return table.io
    kept = {
        name: value
        for name, value in given.items()
        if name not in _CATALOG_LOGIN and not name.startswith("header.")
    }
    return load_file_io(kept, table.location())


@dataclass(frozen=True, slots=True)
class CatalogLink:
    """Where a catalog is, and how to log in."""

    uri: str
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)  # as pyiceberg has them

    def connect(self) -> HistoryCatalog:
        """The catalog; it reads no file and no variable of pyiceberg's own."""
        with self.reached("the catalog"), warnings.catch_warnings():
            # Without `oauth2-server-uri` it gets a token from the catalog itself, as most of them
            # still offer.
            warnings.simplefilter("ignore", DeprecationWarning)
            return HistoryCatalog("headrace", uri=self.uri, **self.properties)

    @contextmanager
    def reached(self, what: str) -> Iterator[None]:
        """Say of a failure whether it may be over later, or a person must act."""
        try:
            yield
        except _PERMISSION as error:
            raise SinkRefused(
                f"{self.uri}: {what}: {self._reason(error)}",
                hint="Check the sink's credential, token and warehouse, and what they permit.",
            ) from None  # the response may repeat what was sent
        except BadRequestError as error:
            raise SinkRefused(
                f"{self.uri}: {what}: {self._reason(error)}",
                hint="Check the sink's settings, and whether the catalog supports this request.",
            ) from None
        except _LATER as error:
            raise SinkUnavailable(f"{self.uri}: {what}: {self._reason(error)}") from None

    def _reason(self, error: BaseException) -> str:
        secrets = [
            value
            for name, value in self.properties.items()
            if any(part in name for part in _SECRET_OPTIONS)
        ]
        # A client's id and its secret are one setting, and the reply may have either.
        parts = {part: part for value in secrets for part in (value, *value.split(":"))}
        return refusal(error, parts)
