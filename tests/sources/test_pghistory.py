"""What a server must send again before its history is known to be the log's."""

import pytest

from headrace.errors import SourceReplaced
from headrace.sources.postgres.history import HistoryProof
from headrace.sources.postgres.pgoutput import WalBegin
from headrace.sources.postgres.resume import LastCommit

KNOWN = LastCommit(lsn=100, xid=7, time=1)
AGAIN = WalBegin(commit_lsn=100, commit_time=1, xid=7)
POSITION = 200  # the log's; nothing of ours lies between 100 and there


def later(lsn: int) -> WalBegin:
    return WalBegin(commit_lsn=lsn, commit_time=2, xid=8)


def test_a_slot_that_stands_where_the_log_does_proves_it() -> None:
    proof = HistoryProof(POSITION, KNOWN, confirmed=POSITION)
    assert (proof.proven, proof.start) == (True, POSITION)


def test_the_last_transaction_and_then_a_later_one_prove_it() -> None:
    proof = HistoryProof(POSITION, KNOWN, confirmed=50)
    assert (proof.proven, proof.start) == (False, 100)
    proof.reached(100)
    proof.began(AGAIN)
    assert not proof.proven
    proof.began(later(POSITION))
    assert proof.proven


def test_a_slot_between_both_needs_nothing_again() -> None:
    proof = HistoryProof(POSITION, KNOWN, confirmed=150)
    assert (proof.proven, proof.start) == (False, 150)
    proof.reached(POSITION)
    assert proof.proven


@pytest.mark.parametrize("confirmed", [50, 150])
@pytest.mark.parametrize("lsn", [160, POSITION - 1])
def test_another_transaction_before_the_position_is_another_history(
    confirmed: int, lsn: int
) -> None:
    with pytest.raises(SourceReplaced, match="another history"):
        HistoryProof(POSITION, KNOWN, confirmed=confirmed).began(later(lsn))


def test_the_last_transaction_that_does_not_come_is_another_history() -> None:
    with pytest.raises(SourceReplaced):
        HistoryProof(POSITION, KNOWN, confirmed=50).reached(101)
    with pytest.raises(SourceReplaced):
        HistoryProof(POSITION, KNOWN, confirmed=50).began(later(POSITION))


def test_transactions_before_a_snapshot_point_may_come_again() -> None:
    until = LastCommit(100, 7, 1, until=150)
    proof = HistoryProof(POSITION, until, confirmed=50)
    for begin in (AGAIN, later(140)):
        proof.began(begin)
    with pytest.raises(SourceReplaced):
        proof.began(later(150))


def test_a_resume_of_an_earlier_version_has_nothing_to_compare() -> None:
    proof = HistoryProof(POSITION, None, confirmed=50)
    assert (proof.proven, proof.start) == (True, POSITION)
