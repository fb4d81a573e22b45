"""What a tables sink stores beside its tables: how far it has come, which tables it knows."""

import msgspec

from ...errors import PipelineError, SinkFenced, SinkUnavailable
from .. import FailedTable, Progress
from ..lake.plan import TableFailure, TableRef
from ..lake.storage import Folder

_PATH = "_headrace/ledger.json"


class TableEntry(msgspec.Struct):
    """One table."""

    ref: TableRef = msgspec.field(name="place")
    failure: TableFailure | None = msgspec.field(default=None, name="trouble")
    applied: int = 0  # the table has had everything up to this sequence; 0: that is not noted
    rescued: int = 0  # values that their columns could not hold, since the sink began
    cascaded: bool = False  # several of its rows may have one sequence: that of a change elsewhere


class CascadingTable(msgspec.Struct):
    """A table of the log, followed or not, whose foreign keys act: its version of now."""

    ref: TableRef
    version: int


class _Content(msgspec.Struct):
    writer: str
    epoch: str = ""
    sequence: int = 0
    upto: int = 0  # the end of the last batch, whatever it was about; 0: that is not noted
    tables: list[TableEntry] = []
    generation: str = "0"  # of the log; "": not known
    cascading: list[CascadingTable] = []


class TablesLedger:
    """A small file in the sink's folder; what it says is already true when it is written."""

    def __init__(self, folder: Folder, content: _Content) -> None:
        self._folder = folder
        self._content = content
        self._entries = {entry.ref: entry for entry in content.tables}
        self._seen: str | None = None  # what was in the file when it was last read or written
        self._owners = {content.writer}  # whose name may stand in the file
        self.absent = False  # there was none when it was opened

    @classmethod
    def open(cls, folder: Folder, writer: str, *, adopt: bool) -> "TablesLedger":
        """The sink's ledger; that of another writer is refused."""
        text = folder.read_text(_PATH)
        content = _Content(writer) if text is None else _read(text, folder)
        if content.writer != writer and not adopt:
            raise SinkFenced(f"another pipeline writes to {folder.uri}")
        ledger = cls(folder, content)
        ledger._seen = text
        ledger._take_over(writer)
        ledger.absent = text is None
        return ledger

    def _take_over(self, writer: str) -> None:
        self._content.writer = writer
        self._owners.add(writer)

    @property
    def epoch(self) -> str:
        """The log that the sink has followed so far; "": none yet."""
        return self._content.epoch

    def progress(self) -> Progress | None:
        """How far every table has come; None: nowhere."""
        content = self._content
        place = Progress(content.epoch, content.sequence, content.generation)
        return place if content.epoch else None

    @property
    def generation(self) -> str:
        """The generation of the log in which that place was reached; "": not known."""
        return self._content.generation

    @property
    def refs(self) -> list[TableRef]:
        """Every table that the sink has had."""
        return list(self._entries)

    def knows(self, ref: TableRef) -> bool:
        """Whether the sink has had this table."""
        return ref in self._entries

    def failure(self, ref: TableRef) -> TableFailure | None:
        """Why the table is not followed; None: it is."""
        entry = self._entries.get(ref)
        return entry.failure if entry else None

    @property
    def upto(self) -> int:
        """The sequence at which the last batch has ended; 0: not known."""
        return self._content.upto

    def applied(self, ref: TableRef) -> int:
        """The sequence up to which the table has had everything; 0: not known."""
        entry = self._entries.get(ref)
        return entry.applied if entry else 0

    def note_applied(self, ref: TableRef, sequence: int) -> None:
        """Remember how far a table has come that is known here."""
        self._entries[ref].applied = sequence

    def note_rescued(self, ref: TableRef, values: int) -> None:
        """Count values that their columns could not hold."""
        self._entries[ref].rescued += values

    @property
    def cascading(self) -> dict[TableRef, int]:
        """The tables whose foreign keys act, each with its version."""
        return {each.ref: each.version for each in self._content.cascading}

    def note_cascading(self, ref: TableRef, version: int) -> None:
        """Remember that the foreign keys of a table act; version 0: they do not."""
        others = [each for each in self._content.cascading if each.ref != ref]
        self._content.cascading = [*others, *([CascadingTable(ref, version)] if version else [])]

    def cascaded(self, ref: TableRef) -> bool:
        """Whether foreign keys have changed rows of a table."""
        entry = self._entries.get(ref)
        return entry is not None and entry.cascaded

    def note_cascaded(self, ref: TableRef) -> None:
        """Remember it."""
        self._entries[ref].cascaded = True

    def rescued_values(self) -> dict[str, int]:
        """How many there were, by table."""
        return {str(entry.ref): entry.rescued for entry in self._content.tables if entry.rescued}

    def failed_tables(self) -> list[FailedTable]:
        """Every table that is not followed."""
        found = [entry for entry in self._content.tables if entry.failure]
        return [
            FailedTable(str(entry.ref), failure.sequence, failure.reason, failure.hint)
            for entry in sorted(found, key=lambda entry: str(entry.ref))
            if (failure := entry.failure)
        ]

    def note(self, ref: TableRef, failure: TableFailure | None) -> None:
        """Remember a table, and what is wrong with it."""
        if ref not in self._entries:
            self._entries[ref] = TableEntry(ref)
            self._content.tables.append(self._entries[ref])
        self._entries[ref].failure = failure

    def forget_failures(self) -> None:
        """Begin anew with every table: another log will fill them."""
        for entry in self._content.tables:
            entry.failure = None
        self._content.cascading = []

    def begin_again(self) -> None:
        """Forget how far every table is, and which tables there were; they are empty now."""
        self._content.epoch, self._content.sequence, self._content.upto = "", 0, 0
        self._content.tables, self._entries = [], {}
        self._content.cascading = []
        self.save()

    def reach(self, place: Progress, upto: int = 0) -> None:
        """Remember that every change up to this one has arrived, with a batch that ends there."""
        epoch, sequence, generation = place
        content = self._content
        content.generation = generation
        if epoch != content.epoch:
            content.epoch, content.sequence, content.upto = epoch, 0, 0
            for entry in content.tables:
                entry.applied = 0
        content.sequence = max(content.sequence, sequence)
        content.upto = max(content.upto, upto)

    def continue_in(self, epoch: str, generation: str) -> None:
        """Remember the same place under the name of a restored log."""
        self._content.epoch, self._content.generation = epoch, generation
        self.save()

    def save(self) -> None:
        """Write it down, if anything changed."""
        text = msgspec.json.encode(self._content).decode()
        if text != self._seen:
            self.expect_ours()
            self._folder.write_text(_PATH, text)
            self._seen = text
            self.absent = False

    def expect_ours(self) -> None:
        """Whoever was taken over from may be at work with tables that the other did not touch."""
        text = self._folder.read_text(_PATH)
        writer = None if text is None else _read(text, self._folder).writer
        if writer is not None and writer not in self._owners:
            raise SinkFenced(f"another pipeline has taken over {self._folder.uri}")
        if writer == self._content.writer and text != self._seen:
            # A job beside this one, or a copy of this query: what it has noted must not be lost.
            raise SinkUnavailable(
                f"another job with this writer has just written to {self._folder.uri}"
            )
        self._owners = {self._content.writer}


def _read(text: str, folder: Folder) -> _Content:
    try:
        return msgspec.json.decode(text, type=_Content)
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{folder.uri}/{_PATH} cannot be read, and it says which tables are not followed",
            hint="Bring it back from a copy, or set another path and let the sink begin anew.",
        ) from error
