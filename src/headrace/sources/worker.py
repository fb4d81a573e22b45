"""A source in a process of its own, so that decoding and serving do not share one Python.

    this process                              the other one
    Apart.open ── _Open ──────────────────▶   source.open
    iterate   ◀── _Batch, _State ─────────    encoded there; only bytes cross
    register  ◀── _Register, _Registered ─▶   register
    ack        ── _Ack ───────────────────▶   ack
    close      ── (end of file) ──────────▶   close

When either ends, the other notices by the end of the pipe: the source's process then ends too, and
the stream here fails with an error that is tried again. What was not acknowledged comes again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import msgspec

from ..change.event import Batch, Table
from ..change.record import ChangeRun, Records, encode_runs
from ..errors import HeadraceError, SourceUnavailable
from ..observe.lines import LineParts, parts_of
from . import Finding, Phase, Register, Removal, Source, Status, Stream
from .redact import ColumnRules, open_redacted, unexpected
from .retained import RetainedLook, RetainingSource

logger = logging.getLogger(__name__)

_STATE_SECONDS = 0.25  # between two words about how it is doing
_PATIENCE_SECONDS = 10.0  # for the other process to end
_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_READ_BYTES = 1 << 20
# glibc's malloc would keep blocks of up to 32 MB that were freed once.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}
_JOINED = 16384  # records, or
_JOINED_BYTES = 4 << 20  # of them: what has arrived meanwhile is stored together, with one sync


class _Open(msgspec.Struct, tag=True):
    source: bytes
    resume: bytes | None
    level: int  # from which on something is logged
    parent: int  # the number of the process that sends this


class _Registered(msgspec.Struct, tag=True):
    table: Table


class _Ack(msgspec.Struct, tag=True):
    resume: bytes


class _Batch(msgspec.Struct, tag=True):
    records: list[bytes]
    resume: bytes | None
    runs: list[ChangeRun]


class _Register(msgspec.Struct, tag=True):
    table: Table


class _State(msgspec.Struct, tag=True):
    status: Status


class _Failed(msgspec.Struct, tag=True):
    error: bytes


class _Logged(msgspec.Struct, tag=True):
    logger: str
    level: int
    message: str
    fields: dict[str, Any]


ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)

_To = _Open | _Registered | _Ack
_From = _Batch | _Register | _State | _Failed | _Logged

_to = msgspec.msgpack.Decoder(_To)
_from = msgspec.msgpack.Decoder(_From)
_pack = msgspec.msgpack.Encoder().encode

_LARGE = 1 << 20  # bytes
_HEAD = struct.Struct(">BI")  # how MessagePack begins an array or bytes: the kind, the length
_RECORDS = _pack("records")
_NO_RECORDS = _RECORDS + _pack([])


class _Outbox:
    """The writing end of a pipe: frames of four bytes of length and a message."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def send(self, message: _To | _From) -> None:
        self._write([_pack(message)])

    def send_batch(self, batch: _Batch) -> None:
        """The same message, without a copy of records that have many megabytes."""
        if sum(map(len, batch.records)) < _LARGE:
            self.send(batch)
            return
        # As the packed message is, with the records put in.
        head, tail = _pack(_Batch([], batch.resume, batch.runs)).split(_NO_RECORDS, 1)
        parts = [head, _RECORDS, _HEAD.pack(0xDD, len(batch.records))]
        for record in batch.records:
            parts += (_HEAD.pack(0xC6, len(record)), record)
        self._write([*parts, tail])

    def _write(self, parts: Sequence[bytes]) -> None:
        with self._lock:
            self._file.write(_LENGTH.pack(sum(map(len, parts))))
            for part in parts:
                self._file.write(part)
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


class _Inbox:
    """The reading end of a pipe."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._buffer = bytearray()
        self._readable = select.poll()
        self._readable.register(file, select.POLLIN)

    def receive(self) -> bytes | None:
        """The next frame; None at the end of the pipe."""
        while not self._whole():
            data = os.read(self._file, _READ_BYTES)
            if not data:
                return None
            self._buffer += data
        end = self._end()
        with memoryview(self._buffer) as whole:
            frame = bytes(whole[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    def ready(self) -> bool:
        """Whether the next frame is there already."""
        while not self._whole():
            # Not select(): it takes no file beyond the 1,024th.
            readable = self._readable.poll(0)
            data = os.read(self._file, _READ_BYTES) if readable else b""
            if not data:
                return False
            self._buffer += data
        return True

    def _whole(self) -> bool:
        return len(self._buffer) >= _LENGTH.size and len(self._buffer) >= self._end()

    def _end(self) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer)
        return _LENGTH.size + int(length)


# --- this side -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apart:
    """A source whose stream runs in another process."""

    source: Source

    @property
    def name(self) -> str:
        """The configured name."""
        return self.source.name

    @property
    def host(self) -> str:
        """The server's name as the settings give it."""
        return self.source.host

    def open(self, resume: bytes | None, register: Register) -> Stream:
        """Begin, or go on after `resume`; the process starts when the stream is first read."""
        return ApartStream(self.source, resume, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew."""
        return self.source.copy_again(resume, tables)

    def describe(self, resume: bytes | None) -> Status:
        """The status behind a stored resume."""
        return self.source.describe(resume)

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        return self.source.check()

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now."""
        return self.source.captured_tables()

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Take everything out of the database that Headrace has put there."""
        return self.source.remove(resume, dry_run=dry_run)

    def look_at_retained(self) -> RetainedLook | None:
        """How to look at what the server keeps for it."""
        source = self.source
        return source.look_at_retained() if isinstance(source, RetainingSource) else None


class ApartStream:
    """The near end of a stream in another process."""

    def __init__(self, source: Source, resume: bytes | None, register: Register) -> None:
        level = logging.getLogger("headrace").getEffectiveLevel()
        self._opening = _Open(pickle.dumps(source), resume, level, os.getpid())
        self._register = register
        self._tables: dict[int, Table] = {}
        self._status = Status(source=source.name, phase=Phase.STARTING)
        self._failure: HeadraceError | None = None
        self._closing = threading.Event()
        self._near: _Outbox | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __iter__(self) -> Iterator[Batch]:
        process = self._process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._near = _Outbox(process.stdin)
        try:
            self._send(self._opening)
            if self._closing.is_set():
                self.close()
            yield from self._batches(_Inbox(process.stdout.fileno()))
        finally:
            self.close()
            process.stdout.close()  # first: the other end may be waiting to be read
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", "from headrace.sources.worker import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | _MALLOC,
                start_new_session=True,  # Ctrl-C is for this process, which then closes the other
            )
        except OSError as error:
            # Files, processes or memory are short for now.
            raise SourceUnavailable(
                f"the process that captures this source cannot be started: {error.strerror}",
                hint="Raise the machine's limits (`ulimit -n` of open files, `ulimit -u` of "
                "processes), or close what uses them up; it is tried again.",
            ) from error

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: the database may forget it."""
        self._send(_Ack(resume))

    def status(self) -> Status:
        """How it is doing; may be called from any thread."""
        return self._status

    def close(self) -> None:
        """End the iteration; may be called from any thread."""
        self._closing.set()
        if self._near is not None and self._process is not None:
            patience = threading.Timer(_PATIENCE_SECONDS, self._process.kill)
            patience.daemon = True
            patience.start()
            with suppress(BrokenPipeError):  # it has ended already
                self._near.close()

    def _batches(self, inbox: _Inbox) -> Iterator[Batch]:
        """What comes, joined as far as it is there already and complete."""
        joined: _Batch | None = None
        size = 0  # bytes of it
        while (frame := inbox.receive()) is not None:
            message = _from.decode(frame)
            size = len(frame) if joined is None else size + len(frame)
            del frame  # it may have many megabytes, and is in the message
            if not isinstance(message, _Batch):
                self._heard(message)
            elif joined is None:
                joined = message
            elif message.resume is None:
                yield self._batch(joined)
                joined = message
            else:
                joined = _Batch(
                    joined.records + message.records, message.resume, joined.runs + message.runs
                )
            if joined is not None and not (size < _JOINED_BYTES and self._more(joined, inbox)):
                yield self._batch(joined)
                joined = None
        if joined is not None:
            yield self._batch(joined)
        if self._failure is not None:
            raise self._failure
        if not self._closing.is_set():
            raise SourceUnavailable("the process that captures this source has ended")

    def _batch(self, message: _Batch) -> Batch:
        return Batch(Records(message.records, self._tables, message.runs), message.resume)

    def _more(self, joined: _Batch, inbox: _Inbox) -> bool:
        """Whether to wait for the frame that follows: a piece of a transaction goes alone."""
        return joined.resume is not None and len(joined.records) < _JOINED and inbox.ready()

    def _heard(self, message: _From) -> None:
        match message:
            case _Register(table):
                registered = self._register(table)
                self._tables[registered.version] = registered
                self._send(_Registered(registered))
            case _State(status):
                self._status = status
            case _Failed(error):
                self._failure = pickle.loads(error)
            case _Logged():
                self._log(message)

    def _log(self, logged: _Logged) -> None:
        """Log here what the other process would have written to nobody."""
        logger, fields = logging.getLogger(logged.logger), logged.fields
        if logger.isEnabledFor(logged.level):
            fields = {"source": self._status.source} | fields
            parts = LineParts(logged.message, fields)
            text = " ".join([logged.message, *(f"{key}={value}" for key, value in fields.items())])
            record = logger.makeRecord(logger.name, logged.level, "", 0, text, (), None)
            record.parts = parts
            logger.handle(record)

    def _send(self, message: _To) -> None:
        try:
            if self._near is not None and not self._closing.is_set():
                self._near.send(message)
        except (BrokenPipeError, ValueError):
            # It has ended or is being closed; whoever reads its batches learns that there.
            return


# --- the other side ------------------------------------------------------------------------------


class _Worker:
    """The far end: runs the stream and sends what comes of it."""

    def __init__(self, near: _Inbox, far: _Outbox, source: Source, resume: bytes | None) -> None:
        self._near = near
        self._far = far
        self._registered: queue.SimpleQueue[Table | None] = queue.SimpleQueue()
        self._registering = threading.Lock()
        self._versions: dict[tuple[str, str], Table] = {}  # the latest of each table
        self._rules = ColumnRules.of_source(source)
        self._stream = open_redacted(source, resume, self._register)

    def run(self) -> None:
        """Until the stream ends, fails or is closed."""
        for target in (self._listen, self._tell):
            threading.Thread(target=target, daemon=True).start()
        try:
            for batch in self._stream:
                records, runs = encode_runs(batch.changes)
                message = _Batch(records, batch.resume, list(runs))
                del batch, records  # they may have many megabytes
                self._far.send_batch(message)
        except HeadraceError as error:
            self._fail(error)
        except BrokenPipeError:
            return  # nobody is left to send it to
        except Exception as error:  # noqa: BLE001 - raised again at the near end
            what = unexpected(error, self._rules)
            self._fail(HeadraceError(f"unexpected {what} in the capturing process"))

    def _fail(self, error: HeadraceError) -> None:
        self._far.send(_State(self._stream.status()))
        self._far.send(_Failed(pickle.dumps(error)))

    def _register(self, table: Table) -> Table:
        name = table.schema, table.name
        with self._registering:
            known = self._versions.get(name)
            # A table is described again whenever it is analysed or truncated. Nobody has to wait
            # for the near end to hear that nothing has changed.
            if known is not None and msgspec.structs.replace(known, version=0) == table:
                return known
            self._far.send(_Register(table))
            registered = self._registered.get()
            if registered is None:
                self._registered.put(None)  # for whoever comes next
                raise SourceUnavailable("closed while a table was registered")
            self._versions[name] = registered
            return registered

    def _listen(self) -> None:
        while (frame := self._near.receive()) is not None:
            match _to.decode(frame):
                case _Registered(table):
                    self._registered.put(table)
                case _Ack(resume):
                    self._stream.ack(resume)
        self._registered.put(None)
        self._stream.close()

    def _tell(self) -> None:
        """Say how it is doing, now and then, for as long as somebody listens."""
        sent_status = None
        pause = threading.Event()
        while not pause.wait(_STATE_SECONDS):
            status = self._stream.status()
            if status != sent_status:
                with suppress(BrokenPipeError):  # nobody is left to send it to
                    self._far.send(_State(status))
                sent_status = status


class _LogToNear(logging.Handler):
    """Sends records to the process that has a log to write them into."""

    def __init__(self, far: _Outbox) -> None:
        super().__init__()
        self.private = False  # whether the text of an error may show what must not be stored
        self._far = far

    def emit(self, record: logging.LogRecord) -> None:
        message, fields = parts_of(record)
        plain = {
            key: value if isinstance(value, int | float) else str(value)
            for key, value in fields.items()
        }
        if record.exc_info:
            plain["exception"] = self._exception(record.exc_info)
        with suppress(BrokenPipeError, ValueError):  # nobody is left to send it to
            self._far.send(_Logged(record.name, record.levelno, message, plain))

    def _exception(self, error: ExceptionInfo) -> str:
        if not self.private:
            return logging.Formatter().formatException(error)
        kind, _, frames = error
        return "".join([*traceback.format_tb(frames), kind.__name__ if kind else ""])


def _end_with(parent: int) -> None:
    """Let this process be killed with the one that has started it.

    It would go on for a moment otherwise, and might begin anew in the database what the successor
    of both has begun there meanwhile.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit()


def main() -> None:
    """Run a source for the process that started this one."""
    # What is printed by mistake must not get between the frames.
    far = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    near = _Inbox(0)
    frame = near.receive()
    if frame is None:
        return
    opening = _to.decode(frame)
    assert isinstance(opening, _Open)
    _end_with(opening.parent)
    outbox = _Outbox(far)
    handler = _LogToNear(outbox)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("headrace").setLevel(opening.level)
    sys.excepthook = lambda *error: logger.critical("the capturing process ended", exc_info=error)
    threading.excepthook = lambda ended: logger.critical("a thread ended", exc_info=ended.exc_value)
    source: Source = pickle.loads(opening.source)
    handler.private = bool(ColumnRules.of_source(source))  # before anything can show a value
    _Worker(near, outbox, source, opening.resume).run()
