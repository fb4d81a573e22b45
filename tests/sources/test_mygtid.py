"""Sets of GTIDs are sets: gaps stay, and text and bytes come back as they were."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError
from headrace.sources.mysql.decode.gtid import MariadbGtid, MariadbGtids, MysqlGtid, MysqlGtids

A = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
B = "00000000-0000-0000-0000-000000000001"
OWNERS = st.sampled_from([(A, ""), (A, "nightly"), (B, ""), (B, "_x9")])
NUMBERS = st.integers(1, 40)
MEMBERS = st.sets(st.tuples(OWNERS, NUMBERS), max_size=40)


def gtids(members: set[tuple[tuple[str, str], int]]) -> MysqlGtids:
    found = MysqlGtids()
    for (source, tag), number in sorted(members):
        found = found.add(MysqlGtid(source, number, tag))
    return found


def test_a_gap_stays_a_gap() -> None:
    found = MysqlGtids.parse(f"{A}:1-7:9-10")
    assert MysqlGtid(A, 8) not in found
    assert MysqlGtid(A, 9) in found
    assert str(found) == f"{A}:1-7:9-10"
    assert str(found.add(MysqlGtid(A, 8))) == f"{A}:1-10"
    assert str(found.add(MysqlGtid(A, 12))) == f"{A}:1-7:9-10:12"


def test_text_as_the_server_prints_it_is_read() -> None:
    assert str(MysqlGtids.parse(f"{B}:1,\n{A.upper()}:5-6:2")) == f"{B}:1,{A}:2:5-6"
    assert str(MysqlGtids.parse(f"{A}:1-3:nightly:1:4-5")) == f"{A}:1-3:nightly:1:4-5"
    assert str(MysqlGtids.parse(f"{A}:Nightly:7")) == f"{A}:nightly:7"
    assert not MysqlGtids.parse("")
    assert str(MysqlGtid(A, 5)) == f"{A}:5"
    assert str(MysqlGtid(A, 5, "nightly")) == f"{A}:nightly:5"


@pytest.mark.parametrize(
    "text", ["x", A, f"{A}:", f"{A}:0", f"{A}:5-1", f"{A}:1-", f"{A}:9x", "0-1-2", f"{A}:1-2-3"]
)
def test_text_that_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        MysqlGtids.parse(text)


@given(MEMBERS, MEMBERS)
def test_sets_are_sets(
    first: set[tuple[tuple[str, str], int]], second: set[tuple[tuple[str, str], int]]
) -> None:
    one, two = gtids(first), gtids(second)
    assert one | two == gtids(first | second)
    assert one - two == gtids(first - second)
    assert (one <= two) is (first <= second)
    assert bool(one) is bool(first)
    for (source, tag), number in second:
        gtid = MysqlGtid(source, number, tag)
        assert (gtid in one) is (((source, tag), number) in first)


@given(MEMBERS)
def test_text_and_bytes_come_back_as_they_were(members: set[tuple[tuple[str, str], int]]) -> None:
    found = gtids(members)
    assert MysqlGtids.parse(str(found)) == found
    assert MysqlGtids.decode(found.encode()) == found


def test_bytes_are_those_of_the_protocol() -> None:
    uuid = bytes.fromhex(A.replace("-", ""))
    # The number after a span ends it.
    spans = struct.pack("<QQQQQ", 2, 1, 8, 9, 11)
    assert MysqlGtids.parse(f"{A}:1-7:9-10").encode() == struct.pack("<Q", 1) + uuid + spans


@given(st.binary(max_size=80))
def test_any_bytes_are_a_set_or_an_error(data: bytes) -> None:
    try:
        MysqlGtids.decode(data)
    except (ValueError, IndexError, struct.error, DecodeError):
        return


# --- MariaDB -------------------------------------------------------------------------------------


def test_a_position_has_the_last_of_each_domain() -> None:
    position = MariadbGtids.parse("1-2-7,0-1-42")
    assert str(position) == "0-1-42,1-2-7"
    assert MariadbGtid(0, 1, 42) in position
    assert MariadbGtid(0, 9, 3) in position  # another server wrote it before
    assert MariadbGtid(0, 1, 43) not in position
    assert MariadbGtid(5, 1, 1) not in position
    assert str(position.add(MariadbGtid(0, 3, 43))) == "0-3-43,1-2-7"
    assert str(MariadbGtids.parse("")) == ""


def test_positions_are_compared_and_joined_by_domain() -> None:
    one, two = MariadbGtids.parse("0-1-5,1-1-9"), MariadbGtids.parse("0-2-7")
    assert not one <= two
    assert not two <= one
    assert str(one | two) == "0-2-7,1-1-9"
    assert one <= one | two
    assert two <= one | two


@pytest.mark.parametrize("text", ["0-1", "a-b-c", "0-1-2,0-3-4", A, "0-1-2-3"])
def test_text_that_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        MariadbGtids.parse(text)


@given(st.dictionaries(st.integers(0, 9), st.tuples(st.integers(1, 9), st.integers(1, 2**64 - 1))))
def test_a_position_comes_back_as_it_was(domains: dict[int, tuple[int, int]]) -> None:
    found = MariadbGtids.of(MariadbGtid(domain, *rest) for domain, rest in domains.items())
    assert MariadbGtids.parse(str(found)) == found
