"""Which descriptions in a stream are those of partitions."""

from headrace.sources.postgres.leaves import WrittenLeaves


def test_a_partition_is_described_right_behind_its_table() -> None:
    leaves = WrittenLeaves()
    leaves.began()
    leaves.described_whole(1, ordinal=0)
    leaves.described_other(2, ordinal=0)
    assert leaves.new
    leaves.described_whole(1, ordinal=5)
    leaves.described_other(3, ordinal=5)
    assert leaves.unlooked == {2: 1, 3: 1}
    leaves.forget([2])
    assert leaves.of(1) == {3: 1}


def test_another_table_is_no_partition_of_the_one_before() -> None:
    leaves = WrittenLeaves()
    leaves.began()
    leaves.described_whole(1, ordinal=0)
    leaves.described_other(2, ordinal=1)  # after a row
    leaves.began()
    leaves.described_other(3, ordinal=0)  # in the next transaction
    leaves.described_whole(1, ordinal=0)
    leaves.described_other(4, ordinal=0)
    leaves.truncated([1, 4])  # TRUNCATE describes all that it names before it
    assert leaves.unlooked == {}
