"""What a tables sink stores beside its tables: how far it has come, which tables it knows."""

import msgspec

from ...errors import PipelineError, SinkFenced
from .. import FailedTable, Progress
from ..lake.plan import TableFailure, TableRef
from ..lake.storage import Folder

_PATH = "_headrace/ledger.json"


class TableEntry(msgspec.Struct):
    """One table."""

    ref: TableRef = msgspec.field(name="place")
    failure: TableFailure | None = msgspec.field(default=None, name="trouble")


class _Content(msgspec.Struct):
    writer: str
    epoch: str = ""
    sequence: int = 0
    tables: list[TableEntry] = []


class TablesLedger:
    """A small file in the sink's folder; what it says is already true when it is written."""

    def __init__(self, folder: Folder, content: _Content) -> None:
        self._folder = folder
        self._content = content
        self._entries = {entry.ref: entry for entry in content.tables}
        self._written = b""
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
        return Progress(content.epoch, content.sequence) if content.epoch else None

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

    def begin_again(self) -> None:
        """Forget how far every table is, and which tables there were; they are empty now."""
        self._content.epoch, self._content.sequence = "", 0
        self._content.tables, self._entries = [], {}
        self.save()

    def reach(self, epoch: str, sequence: int) -> None:
        """Remember that every change up to this one has arrived."""
        if epoch != self._content.epoch:
            self._content.epoch, self._content.sequence = epoch, 0
        self._content.sequence = max(self._content.sequence, sequence)

    def continue_in(self, epoch: str) -> None:
        """Remember the same place under the name of a restored log."""
        self._content.epoch = epoch
        self.save()

    def save(self) -> None:
        """Write it down, if anything changed."""
        text = msgspec.json.encode(self._content)
        if text != self._written:
            self._expect_ours()
            self._folder.write_text(_PATH, text.decode())
            self._written = text
            self.absent = False

    def _expect_ours(self) -> None:
        """Whoever was taken over from may be at work with tables that the other did not touch."""
        text = self._folder.read_text(_PATH)
        if text is not None and _read(text, self._folder).writer not in self._owners:
            raise SinkFenced(f"another pipeline has taken over {self._folder.uri}")
        self._owners = {self._content.writer}


def _read(text: str, folder: Folder) -> _Content:
    try:
        return msgspec.json.decode(text, type=_Content)
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{folder.uri}/{_PATH} cannot be read, and it says which tables are not followed",
            hint="Bring it back from a copy, or set another path and let the sink begin anew.",
        ) from error
