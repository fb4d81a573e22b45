"""Which tables are copied when names have changed hands."""

import pytest
from msgspec.structs import replace

from headrace.sources.postgres.catalog import Published
from headrace.sources.postgres.resume import PostgresResume, PostgresTableSnapshot
from headrace.sources.postgres.session import with_tables


def resume(**relations: int) -> PostgresResume:
    """Every table named is copied, under its oid."""
    return PostgresResume(
        system="1",
        timeline=1,
        database="shop",
        slot="headrace",
        position=1,
        xid=1,
        snapshots={
            f"public.{name}": PostgresTableSnapshot(oid, ()) for name, oid in relations.items()
        },
        errored={},
        versions={},
        former=(),
    )


def tables(**relations: int) -> list[Published]:
    return [Published("public", name, oid, None) for name, oid in relations.items()]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"summer": 1}, {"summer": 2, "summer_gone": 1}),  # renamed, and made anew
        ({"summer": 1, "summer_gone": 3}, {"summer": 2, "summer_gone": 1}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),  # swapped
        ({"a": 1, "b": 2}, {"b": 1, "c": 2}),
    ],
)
def test_every_table_whose_name_has_another_is_copied_anew(
    before: dict[str, int], now: dict[str, int]
) -> None:
    for order in (now, dict(reversed(now.items()))):
        found = with_tables(resume(**before), tables(**order), copying=True)
        assert {path: copy.relation for path, copy in found.snapshots.items()} == {
            f"public.{name}": oid for name, oid in now.items()
        }
        assert all(copy.ranges is None and copy.again for copy in found.snapshots.values())


def test_a_path_stored_without_quotes_goes_on_under_the_one_with_quotes() -> None:
    before = replace(resume(**{"a.b": 1, "c": 2}), versions={"public.a.b": 7})
    # Its namesake, which such a resume could not name beside it.
    found = [*tables(**{"a.b": 1, "c": 2}), Published("public.a", "b", 3, None)]
    after = with_tables(before, found, copying=True)
    assert after.versions == {'public."a.b"': 7}
    assert after.former == ()
    assert {path: (each.relation, each.done) for path, each in after.snapshots.items()} == {
        'public."a.b"': (1, True),
        "public.c": (2, True),
        '"public.a".b': (3, False),
    }
