"""Changes of rows that follow from foreign keys: stored before they are applied, read by tasks.

A batch that is repeated after some of its tables were committed could not find them again: the rows
that they follow from are other ones by then. So they are stored first, and used again.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ...errors import SinkUnavailable
from ..lake.plan import CascadedPlace, TablePlan, TableRef
from ..lake.storage import OWN_FOLDER, Folder
from .fold import RowChange, SequencedRecord

_PATH = f"{OWN_FOLDER}/cascaded"


class CascadedChanges(msgspec.Struct, frozen=True):
    """What foreign keys do to the rows of tables in one range of the log."""

    epoch: str
    generation: str  # of the log, when it was read; "": not known
    after: int
    upto: int
    token: str  # no other ones have it
    tables: list[tuple[TableRef, list[RowChange]]] = []

    @property
    def by_table(self) -> Mapping[TableRef, Sequence[RowChange]]:
        """The changes of each table, in order."""
        return dict(self.tables)


def read_cascaded(folder: Folder) -> CascadedChanges | None:
    """Those that were stored last in a sink's folder; None: there are none."""
    with folder.reached(_PATH):
        content = folder.objects.read(_PATH)
    return msgspec.msgpack.decode(content, type=CascadedChanges) if content else None


def write_cascaded(folder: Folder, changes: CascadedChanges) -> None:
    """Replace those that are stored."""
    folder.write_bytes(_PATH, msgspec.msgpack.encode(changes))


def forget_cascaded(folder: Folder) -> None:
    """Remove them: they are of tables that begin again."""
    with folder.reached(_PATH):
        folder.objects.delete([_PATH])


def cascaded_records(plans: Iterable[TablePlan]) -> dict[TableRef, list[SequencedRecord]]:
    """The stored changes of tables that have such, in order; runs in Spark's tasks."""
    places = {plan.ref: plan.cascaded for plan in plans if plan.cascaded}
    for place in places.values():
        stored = _expected(place)  # all of a batch are in one place
        by_table = stored.by_table
        return {ref: [each.as_record() for each in by_table[ref]] for ref in places}
    return {}


def _expected(place: CascadedPlace) -> CascadedChanges:
    found = read_cascaded(place.folder)
    if found is None or found.token != place.token:
        raise SinkUnavailable(f"{place.folder.uri}/{_PATH} is not that of this batch any more")
    return found
