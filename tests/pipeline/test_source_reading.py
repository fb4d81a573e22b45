"""Ranges are read whole from disk and from a server, or an error says why not."""

import pickle
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.change.arrow import decode
from headrace.errors import (
    ChangesLost,
    ConfigError,
    LogAbsent,
    LogReplaced,
    LogUnreachable,
    PipelineError,
    ServerError,
)
from headrace.log import Log
from headrace.log.keys import KeyLimits, KeyRequest
from headrace.pipeline import lag, remote
from headrace.pipeline.options import Options
from headrace.pipeline.query import PipelineInput
from headrace.pipeline.reading import DiskLog, LogAccess, PipelineLog, SequenceRange, read
from headrace.pipeline.remote import RemoteLog
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve.keyring import Keyring
from headrace.sinks import LogBlock, LogRange
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer
from tests.log.blocks import stored_block
from tests.pipeline.reach import certificate, relaying

OPTIONS = Options(path="anywhere")


class Shop:
    """A log, and a server over it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.writer = stack.enter_context(opened_writer(folder))
        settings = ServerSettings(port=0)
        app = create_app(self.log, statuses=list, copy_again=None, settings=settings)
        self.keyring: Keyring = app.state.service.keyring
        self.server = stack.enter_context(BackgroundServer(app, settings))
        self.disk = DiskLog(str(folder))
        self.remote = RemoteLog(self.server.url)

    @property
    def log(self) -> Log:
        return self.writer.log

    def all(self) -> SequenceRange:
        return SequenceRange(self.log.epoch, 0, self.log.latest_sequence)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(tmp_path / "log", stack)


@pytest.fixture(params=["disk", "remote"])
def reading(request: pytest.FixtureRequest, shop: Shop) -> LogAccess:
    """Each way to reach the shop's log."""
    chosen: LogAccess = getattr(shop, request.param)
    return chosen


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.0)


def table(reading: LogAccess, wanted: SequenceRange, options: Options = OPTIONS) -> pa.Table:
    return pa.Table.from_batches(read(reading, wanted, options))


def sequences(reading: LogAccess, wanted: SequenceRange, options: Options = OPTIONS) -> list[int]:
    batches = read(reading, wanted, options)
    return [n for batch in batches for n in batch["sequence"].to_pylist()]


def fill(writer: Writer) -> None:
    """Some of everything, in more than one piece."""
    writer.put("users", "alice", name="Alice")
    writer.put_many("orders", 12_000)
    writer.delete("users", "alice")


def test_disk_and_server_give_what_the_log_holds(shop: Shop) -> None:
    fill(shop.writer)
    near, far = table(shop.disk, shop.all()), table(shop.remote, shop.all())
    assert near.equals(far)
    changes = shop.log.read(0, limit=100_000)
    assert near["id"].to_pylist() == [change.id for change in changes]
    assert near["after"].to_pylist() == [
        change.after and change.after.decode() for change in changes
    ]
    assert near["sequence"].to_pylist() == [change.sequence for change in changes]


def test_ranges_are_the_same_from_disk_and_server(shop: Shop) -> None:
    fill(shop.writer)
    for bounds in ({}, {"limit": 10}, {"upto": 7000}, {"parts": 2}):
        assert (
            shop.disk.ranges(0, **bounds)
            == shop.remote.ranges(0, **bounds)
            == shop.log.ranges(0, **bounds)
        )


def test_a_range_is_read_again_alike_while_the_log_grows(shop: Shop, reading: LogAccess) -> None:
    fill(shop.writer)
    wanted = SequenceRange(shop.log.epoch, 100, 6000)
    before = table(reading, wanted)
    shop.writer.put("customers", "new")
    assert table(reading, wanted).equals(before)
    assert sequences(reading, wanted) == list(range(101, 6001))


def test_a_table_that_came_later_is_known(shop: Shop, reading: LogAccess) -> None:
    shop.writer.put("users", "1")
    assert table(reading, shop.all())["table"].to_pylist() == ["users"]
    shop.writer.put("orders", "1")
    assert table(reading, shop.all())["table"].to_pylist() == ["users", "orders"]


def test_only_requested_tables_are_read(shop: Shop, reading: LogAccess) -> None:
    fill(shop.writer)
    options = Options(path="x", tables=("us*",), chosen=("sequence",))
    assert sequences(reading, shop.all(), options) == [1, 12_002]


def test_what_was_trimmed_is_an_error_or_left_out(shop: Shop, reading: LogAccess) -> None:
    shop.writer.put_many("users", 9)
    wanted = shop.all()
    shop.log.trim(4)
    with pytest.raises(ChangesLost, match=r"changes 1 to 3 .* oldest change is 4"):
        table(reading, wanted)
    assert sequences(reading, wanted, Options(path="x", strict=False)) == list(range(4, 10))


def test_a_range_that_was_trimmed_whole_is_noticed(shop: Shop, reading: LogAccess) -> None:
    shop.writer.put_many("users", 9)
    shop.log.trim(8)
    with pytest.raises(ChangesLost, match="changes 1 to 5"):
        sequences(reading, SequenceRange(shop.log.epoch, 0, 5))
    lenient = Options(path="x", strict=False)
    assert sequences(reading, SequenceRange(shop.log.epoch, 0, 5), lenient) == []


def test_retention_that_passes_a_reader_is_noticed(shop: Shop) -> None:
    shop.writer.put_many("users", 20_000)
    batches = read(shop.disk, shop.all(), Options(path="x", chosen=("sequence",)))
    next(batches)
    shop.log.trim(20_000)
    shop.disk.ranges(0)  # another task of the same process catches up with the writer
    with pytest.raises(ChangesLost, match="to 19999 are no longer"):
        list(batches)


def test_another_log_is_noticed(shop: Shop, reading: LogAccess) -> None:
    shop.writer.put("users", "1")
    with pytest.raises(LogReplaced, match=f"log other, but this one is {shop.log.epoch}"):
        sequences(reading, SequenceRange("other", 0, 1))


def test_a_range_beyond_the_log_is_an_error(shop: Shop, reading: LogAccess) -> None:
    shop.writer.put("users", "1")
    with pytest.raises(PipelineError, match="the log ends at 1 where this executor reads it"):
        sequences(reading, SequenceRange(shop.log.epoch, 0, 5))


def test_a_log_replaced_on_disk_is_opened_anew(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with opened_writer(folder) as writer:
        writer.put("users", "1")
    old = DiskLog(str(folder)).ranges(0)
    shutil.rmtree(folder)
    with pytest.raises(LogAbsent):
        DiskLog(str(folder)).ranges(0)
    with opened_writer(folder) as writer:
        writer.put_many("users", 3)
    new = DiskLog(str(folder)).ranges(0)
    assert (old.ends, new.ends) == ([1], [3])
    with pytest.raises(LogReplaced):
        sequences(DiskLog(str(folder)), SequenceRange(old.epoch, 0, 1))


@pytest.mark.parametrize("cut_after", [0, 10, 100, 150, 200, 230, 250, 270, 1_000, 800_000])
def test_a_connection_cut_short_goes_on_where_it_was(shop: Shop, cut_after: int) -> None:
    fill(shop.writer)
    with relaying(shop.server.url) as relay:
        relay.cut_after = [cut_after, cut_after]
        wanted = shop.all()
        assert sequences(RemoteLog(relay.url), wanted) == list(range(1, wanted.upto + 1))
        assert relay.cuts > 0


@pytest.mark.usefixtures("no_patience")
def test_a_server_that_is_gone_is_reported_after_a_while(shop: Shop) -> None:
    shop.writer.put("users", "1")
    wanted = shop.all()
    assert shop.remote.ranges(0).ends == [1]
    shop.server.stop()
    with pytest.raises(LogUnreachable, match="no Headrace server answers at http://127"):
        shop.remote.ranges(0)
    with pytest.raises(LogUnreachable) as caught:
        sequences(shop.remote, wanted)
    assert caught.value.retry
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), LogUnreachable)


def test_a_connection_that_went_stale_is_replaced_at_once(shop: Shop) -> None:
    with relaying(shop.server.url) as relay:
        relay.cut_after = [1_000]
        server = RemoteLog(relay.url)
        for _ in range(9):  # the first connection breaks in the middle of them
            assert server.ranges(0).epoch == shop.log.epoch
        assert relay.cuts == 1


def test_the_key_is_sent_from_the_environment_or_a_file(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (shop.keyring.create(KeyRequest()).secret for _ in range(2))
    monkeypatch.setenv("SHOP_KEY", one)
    (tmp_path / "key").write_text(f"{other}\n")
    with relaying(shop.server.url) as relay:
        RemoteLog(relay.url, key_env="SHOP_KEY").ranges(0)
        assert f"X-API-Key: {one}\r\n".encode() in relay.heard
        RemoteLog(relay.url, key_file=str(tmp_path / "key")).ranges(0)
        assert f"X-API-Key: {other}\r\n".encode() in relay.heard


def test_a_key_for_everything_reads_ranges_records_and_tables(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.writer.put_many("users", 3)
    monkeypatch.setenv("SHOP_KEY", shop.keyring.create(KeyRequest()).secret)
    assert sequences(RemoteLog(shop.server.url, key_env="SHOP_KEY"), shop.all()) == [1, 2, 3]


def test_a_key_that_reads_too_fast_is_patient(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.writer.put_many("users", 3)
    made = shop.keyring.create(KeyRequest(limits=KeyLimits(requests_per_second=4.0)))
    monkeypatch.setenv("SHOP_KEY", made.secret)
    server = RemoteLog(shop.server.url, key_env="SHOP_KEY")
    assert [server.ranges(0).latest_sequence for _ in range(6)] == [3] * 6


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (KeyRequest(tables=("users",)), "403: this route shows all tables"),
        (KeyRequest(tenant="t1"), "403: this route shows all tables"),
        (None, "401: a valid API key is needed"),
    ],
)
def test_another_key_is_refused_with_the_reason(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, wanted: KeyRequest | None, message: str
) -> None:
    shop.writer.put_many("users", 3)
    secret = shop.keyring.create(wanted).secret if wanted else "cdc_" + "0" * 64
    monkeypatch.setenv("SHOP_KEY", secret)
    with pytest.raises(ServerError, match=message) as caught:
        sequences(RemoteLog(shop.server.url, key_env="SHOP_KEY"), shop.all())
    assert secret not in f"{caught.value!r} {caught.value.hint}"


def test_a_key_that_is_not_there_is_reported(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ABSENT_KEY, which apiKeyEnv names, is not set"):
        RemoteLog(shop.server.url, key_env="ABSENT_KEY").ranges(0)
    with pytest.raises(ConfigError, match="absent, which apiKeyFile names, cannot be read"):
        RemoteLog(shop.server.url, key_file=str(tmp_path / "absent")).ranges(0)


def test_tls_is_spoken_and_certificates_are_checked(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shop.writer)
    trusted, context = certificate(tmp_path)
    with relaying(shop.server.url, context) as relay:
        with pytest.raises(ServerError, match=r"certificate of https://localhost:.* not trusted"):
            RemoteLog(relay.url).ranges(0)
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert table(RemoteLog(relay.url), shop.all()).equals(table(shop.disk, shop.all()))


def test_a_refusal_says_what_the_server_replied(shop: Shop) -> None:
    with pytest.raises(ServerError, match="answers 400: after must be a whole number"):
        shop.remote.ranges(-1)
    with pytest.raises(ServerError, match="answers 404: there is nothing at /elsewhere/v1/ranges"):
        RemoteLog(shop.server.url + "/elsewhere").ranges(0)


@pytest.mark.requirement("P-13")
def test_a_pipeline_elsewhere_keeps_what_its_sinks_need_by_cursors(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "NOTE_SECONDS", 0.0)
    shop.writer.put_many("users", 10)
    feed = PipelineInput(address={"url": shop.server.url})
    places = lag.HeldPlaces(feed)

    def noted(**positions: int | None) -> dict[str, int]:
        places.note(positions, feed.look())
        return {cursor.name: cursor.sequence for cursor in shop.log.cursors()}

    assert noted(lake=4, new=0, unknown=None) == {"sink.lake": 4, "sink.new": 0}
    assert noted(lake=7, new=7) == {"sink.lake": 7, "sink.new": 7}
    assert noted(lake=2) == {"sink.lake": 2, "sink.new": 7}, "it was reset"
    assert shop.log.trim(9).held_by == "sink.lake"
    with lag.LogEnd(feed, lambda: {"lake": 9}):
        wait_until(lambda: _at(shop, "sink.lake") == 9, timeout=60, message="it is noted")


def _at(shop: Shop, name: str) -> int:
    cursor = shop.log.cursor(name)
    return -1 if cursor is None else cursor.sequence


# --- blocks --------------------------------------------------------------------------------------


def filled_with_blocks(shop: Shop) -> None:
    shop.writer.put("users", "alice")
    for number, size in ((2, 12_000), (3, 1), (4, 50)):
        stored_block(shop.log, number, size)
    shop.writer.put("users", "bob")


@pytest.mark.requirement("C-28")
def test_blocks_are_read_as_changes_from_disk_and_server(shop: Shop, reading: LogAccess) -> None:
    filled_with_blocks(shop)
    changes = shop.log.read(0, limit=100_000)
    found = table(reading, shop.all())
    assert found["id"].to_pylist() == [change.id for change in changes]
    assert found["sequence"].to_pylist() == list(range(1, 12_054))
    part = SequenceRange(shop.log.epoch, 5_000, 12_010)
    assert sequences(reading, part) == list(range(5_001, 12_011))


@pytest.mark.requirement("C-28")
def test_a_sink_gets_blocks_as_columns(shop: Shop, reading: LogAccess) -> None:
    filled_with_blocks(shop)
    log = PipelineLog(reading, OPTIONS)
    wanted = LogRange(log, shop.log.epoch, 100, 12_030)
    columns, records = [], []
    for part in wanted.blocks():
        if isinstance(part, LogBlock):
            assert part.transaction.id.startswith("snapshot-")
            assert part.described.name == "users"
            columns.append(part.columns(["name", "id"]))
            assert part.columns(["id"]).num_rows == part.count == part.last - part.first + 1
            records.append((part.first, part.count, part.records()))
        else:
            records.append(part)
    assert _joined(records) == _joined(wanted.pieces())
    images = [change.after for change in shop.log.read(100, limit=100_000, upto=12_030)]
    described = shop.log.table(1).columns
    typed = decode(images, described, connector="postgres").select(["name", "id"])
    assert pa.concat_tables(columns).equals(typed)
    assert [first for first, _, _ in records] == [101, 12_002, 12_003]


@pytest.mark.requirement("C-28")
def test_rows_of_a_block_that_were_trimmed_are_missed(shop: Shop, reading: LogAccess) -> None:
    filled_with_blocks(shop)
    shop.log.trim(3_000)
    log = PipelineLog(reading, OPTIONS)
    with pytest.raises(ChangesLost, match="changes 101 to 2999"):
        list(LogRange(log, shop.log.epoch, 100, 12_030).blocks())
    left = LogRange(log, shop.log.epoch, 2_999, 12_030)
    assert _joined(left.blocks())[0] == _joined(left.pieces())[0] == 3_000


def _joined(parts: Iterable[Any]) -> tuple[int, int, bytes]:
    """Neighbouring parts as one."""
    whole = [
        (part.first, part.count, part.records()) if isinstance(part, LogBlock) else part
        for part in parts
    ]
    return whole[0][0], sum(count for _, count, _ in whole), b"".join(each[2] for each in whole)
