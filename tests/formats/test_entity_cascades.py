"""The entity format: what a transaction did beside the change that an event is about."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op, Reference, Table
from headrace.formats.entity import Entity
from headrace.model import EntityType, Model, Parent, Selection
from tests.formats.entities import (
    COMMENTS,
    FIRST,
    POSTS,
    USERS,
    Event,
    Step,
    deleted,
    deleted_by_key,
    ids,
    inserted,
    make_entity_table,
    model,
    render,
    render_one,
    to,
    transaction,
    updated,
)

EMPTY: Event = {"updated": [], "deleted": [], "invalidations": []}


def folded(event: Event) -> list[str]:
    """What an event lists as deleted because its own entity was."""
    return [
        entity
        for entity, entry in zip(
            ids(event["cascade"]["deleted"]), event["cascade"]["deleted"], strict=True
        )
        if entry["reason"] == "parent_deleted"
    ]


def families(*steps: Step, by: Model | None = None) -> dict[str, list[str]]:
    """The events of a transaction without annotations: each entity, and what went with it."""
    events = render(transaction(*steps), by)
    return dict(zip(ids(events), map(folded, events), strict=True))


# --- deleted with their parents ------------------------------------------------------------------


@pytest.mark.requirement("S1-24")
def test_a_cascade_always_has_its_three_lists() -> None:
    for step in (inserted(USERS, id="1"), deleted(USERS, id="1")):
        assert render_one(transaction(step))["cascade"] == EMPTY


@pytest.mark.requirement("S1-47", "S1-26", "C-07")
def test_a_user_and_three_posts_are_one_event() -> None:
    posts = [deleted(POSTS, id=f"p{n}", user_id="u1") for n in (1, 2, 3)]
    event = render_one(transaction(deleted(USERS, id="u1"), *posts))
    assert ids([event]) == ["User:u1"]
    assert event["event_type"] == "entity:deleted"
    assert event["cascade"]["deleted"] == [
        {"entity_type": "Post", "entity_id": f"p{n}", "reason": "parent_deleted"} for n in (1, 2, 3)
    ]


@pytest.mark.requirement("C-07", "S1-42")
def test_children_may_be_deleted_first_and_the_event_stands_where_its_row_does() -> None:
    steps = [deleted(POSTS, id="p1", user_id="u1"), deleted(USERS, id="u1")]
    event = render_one(transaction(*steps))
    assert ids([event]) == ["User:u1"]
    assert folded(event) == ["Post:p1"]
    assert event["sequence_number"] == FIRST + 1


@pytest.mark.requirement("C-07")
def test_rows_fold_at_any_depth() -> None:
    assert families(
        deleted(COMMENTS, id="c1", post_id="p1", author_id="u9"),
        deleted(POSTS, id="p1", user_id="u1"),
        deleted(USERS, id="u1"),
    ) == {"User:u1": ["Comment:c1", "Post:p1"]}


@pytest.mark.requirement("C-07")
def test_only_what_hung_on_a_deleted_row_folds() -> None:
    assert families(
        deleted(USERS, id="u1"),
        deleted(POSTS, id="p1", user_id="u1"),
        deleted(POSTS, id="p2", user_id="u2"),
        deleted(POSTS, id="p3", user_id=None),
        updated(POSTS, {"id": "p4", "user_id": "u1"}, user_id=None),
        inserted(POSTS, id="p5", user_id="u1"),
    ) == {"User:u1": ["Post:p1"], "Post:p2": [], "Post:p3": [], "Post:p4": [], "Post:p5": []}


@pytest.mark.requirement("C-07", "C-03")
def test_a_row_whose_foreign_key_was_not_sent_stands_alone() -> None:
    assert families(deleted(USERS, id="u1"), deleted_by_key(POSTS, id="p1")) == {
        "User:u1": [],
        "Post:p1": [],
    }


def test_a_foreign_key_that_is_part_of_the_key_is_always_known() -> None:
    items = make_entity_table("items", references=[to("orders", "order")], key=("order", "line"))
    orders = make_entity_table("orders")
    assert families(deleted_by_key(orders, id=7), deleted_by_key(items, order=7, line=1)) == {
        "Order:7": ["Item:7:1"]
    }


def test_a_parent_may_be_named_by_another_unique_column() -> None:
    badges = make_entity_table("badges", "email", references=[to("users", "email", "email")])
    assert families(
        deleted(USERS, id="u1", email="a@b"),
        deleted(badges, id="b1", email="a@b"),
        deleted(badges, id="b2", email="u1"),
    ) == {"User:u1": ["Badge:b1"], "Badge:b2": []}
    # Nothing is not a name.
    nameless = [deleted(USERS, id="u1", email=None), deleted(badges, id="b1", email=None)]
    assert families(*nameless) == {"User:u1": [], "Badge:b1": []}
    # The parent's own row must tell it, too.
    assert families(deleted_by_key(USERS, id="u1"), deleted(badges, id="b1", email="a@b")) == {
        "User:u1": [],
        "Badge:b1": [],
    }


def test_a_foreign_key_of_several_columns_names_a_row_by_all_of_them() -> None:
    rooms = make_entity_table("rooms", key=("house", "number"))
    reference = Reference(("room", "house"), "public", "rooms", ("number", "house"))
    beds = make_entity_table("beds", "house", "room", references=[reference])
    assert families(
        deleted(rooms, house="h", number=1),
        deleted(beds, id="b1", house="h", room=1),
        deleted(beds, id="b2", house="h", room=2),
        deleted(beds, id="b3", house=None, room=1),
    ) == {"Room:h:1": ["Bed:b1"], "Bed:b2": [], "Bed:b3": []}


def test_a_number_names_the_same_number_written_as_text() -> None:
    assert families(deleted(USERS, id="7"), deleted(POSTS, id="p1", user_id=7)) == {
        "User:7": ["Post:p1"]
    }


def test_a_table_of_the_same_name_in_another_schema_is_another_table() -> None:
    others = make_entity_table("users", schema="archive")
    assert families(deleted(others, id="u1"), deleted(POSTS, id="p1", user_id="u1")) == {
        "User:u1": [],
        "Post:p1": [],
    }


@pytest.mark.requirement("C-07")
def test_of_several_parents_the_one_with_the_lowest_sequence_counts() -> None:
    comment = deleted(COMMENTS, id="c1", post_id="p1", author_id="u2")
    post, author = deleted(POSTS, id="p1", user_id=None), deleted(USERS, id="u2")
    assert families(comment, post, author) == {"Post:p1": ["Comment:c1"], "User:u2": []}
    assert families(author, comment, post) == {"User:u2": ["Comment:c1"], "Post:p1": []}


FOLDERS = make_entity_table("folders", "parent_id", references=[to("folders", "parent_id")])


def folder(id: str, parent: str | None) -> Step:
    return deleted(FOLDERS, id=id, parent_id=parent)


@pytest.mark.requirement("C-07")
def test_a_table_may_refer_to_itself() -> None:
    assert families(folder("c", "b"), folder("b", "a"), folder("a", None), folder("x", "y")) == {
        "Folder:a": ["Folder:c", "Folder:b"],
        "Folder:x": [],
    }
    assert families(folder("a", "a"), folder("b", "a")) == {"Folder:a": ["Folder:b"]}


@pytest.mark.requirement("C-07")
def test_of_a_circle_the_lowest_sequence_is_told() -> None:
    circle = [folder("a", "b"), folder("b", "c"), folder("c", "a")]
    for steps in itertools.permutations(circle):
        first, *rest = [f"Folder:{(step.before or {})['id']}" for step in steps]
        assert families(*steps) == {first: rest}


@pytest.mark.requirement("C-07")
def test_what_hangs_on_a_circle_folds_into_it_whatever_came_first() -> None:
    steps = [folder("x", "b"), folder("b", "a"), folder("y", "x"), folder("a", "b")]
    assert families(*steps) == {"Folder:b": ["Folder:x", "Folder:y", "Folder:a"]}


@pytest.mark.requirement("C-07")
def test_of_a_circle_and_another_parent_the_lowest_sequence_counts() -> None:
    def both(id: str, a: str | None, b: str | None) -> Step:
        return deleted(NODES, id=id, a=a, b=b)

    steps = [both("1", "2", None), both("2", "1", None), both("3", None, None), both("4", "3", "1")]
    assert families(*steps) == {"Node:1": ["Node:2", "Node:4"], "Node:3": []}


NODES = make_entity_table("nodes", "a", "b", references=[to("nodes", "a"), to("nodes", "b")])


@given(st.lists(st.tuples(*[st.none() | st.integers(0, 7)] * 2), max_size=8))
def test_every_deleted_row_is_in_one_event_whose_entity_stands_above_it(
    named: Sequence[tuple[int | None, int | None]],
) -> None:
    steps = [deleted(NODES, id=at, a=a, b=b) for at, (a, b) in enumerate(named)]
    above = {
        at: {p for p in parents if p is not None and p < len(named)} - {at}
        for at, parents in enumerate(named)
    }
    ancestors = {at: _closure(at, above) for at in above}
    events = families(*steps) if steps else {}
    told = {
        int(top.removeprefix("Node:")): [int(each.removeprefix("Node:")) for each in below]
        for top, below in events.items()
    }
    assert sorted([*told, *itertools.chain(*told.values())]) == list(range(len(named)))
    for top, below in told.items():
        # Nothing stands above it but its own circle, of which it has the lowest sequence.
        assert all(top in ancestors[each] and top < each for each in ancestors[top] - {top})
        for each in below:
            tops = [other for other in told if other in ancestors[each]]
            assert top == min(tops)


def _closure(start: int, above: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for each in above[waiting.pop()] - found:
            found.add(each)
            waiting.append(each)
    return found


@pytest.mark.requirement("C-07")
def test_a_row_deleted_twice_is_listed_once() -> None:
    post = {"id": "p1", "user_id": "u1"}
    event = render(
        transaction(
            deleted(POSTS, **post), inserted(POSTS, **post), deleted(POSTS, **post),
            deleted(USERS, id="u1"),
        )
    )[-1]  # fmt: skip
    assert folded(event) == ["Post:p1"]


def test_a_model_adds_foreign_keys_that_the_database_does_not_declare() -> None:
    users = make_entity_table("users", "org_id")
    organizations = make_entity_table("organizations", "slug")
    by_id = EntityType(
        name="User", table="users", parents=(Parent(entity="Organization", columns=("org_id",)),)
    )
    steps = [deleted(organizations, id="o1", slug="acme"), deleted(users, id="u1", org_id="o1")]
    assert families(*steps) == {"Organization:o1": [], "User:u1": []}
    assert families(*steps, by=model(by_id)) == {"Organization:o1": ["User:u1"]}
    parent = Parent(entity="Organization", columns=("org_id",), parent_columns=("slug",))
    by_slug = msgspec.structs.replace(by_id, parents=(parent,))
    steps[1] = deleted(users, id="u1", org_id="acme")
    assert families(*steps, by=model(by_slug)) == {"Organization:o1": ["User:u1"]}


# --- which entities ------------------------------------------------------------------------------

CHAIN = [
    deleted(USERS, id="u1"),
    deleted(POSTS, id="p1", user_id="u1"),
    deleted(COMMENTS, id="c1", post_id="p1", author_id=None),
]


def without(*entities: str) -> Model:
    return Model().selected(Selection(exclude_entities=entities))


@pytest.mark.requirement("S1-52")
def test_an_entity_that_is_left_out_is_in_no_cascade_but_still_connects() -> None:
    assert families(*CHAIN, by=without("Post")) == {"User:u1": ["Comment:c1"]}


@pytest.mark.requirement("S1-52", "S1-21", "S1-23")
def test_what_hung_on_an_entity_that_is_left_out_is_told_as_deleted_by_a_cascade() -> None:
    changes = transaction(*CHAIN)
    event = render_one(changes, without("User"))
    assert (ids([event]), folded(event)) == (["Post:p1"], ["Comment:c1"])
    assert event["operation"]["trigger"] == "cascade_delete"
    event = render_one(changes, without("User", "Post"))
    assert (ids([event]), event["operation"]["trigger"]) == (["Comment:c1"], "cascade_delete")
    assert render_one(changes)["operation"]["trigger"] == "admin_action"
    said = transaction(*CHAIN, said={"trigger": "api_delete"})
    assert render_one(said, without("User"))["operation"]["trigger"] == "api_delete"


@pytest.mark.requirement("S1-52")
def test_a_mutation_of_an_entity_that_is_left_out_is_told_by_its_other_rows() -> None:
    changes = transaction(*CHAIN, said={"root": "User:u1"})
    event = render_one(changes, without("User"))
    assert (ids([event]), event["metadata"]) == (["Post:p1"], {})


# --- one mutation --------------------------------------------------------------------------------

ORGANIZATIONS = make_entity_table("organizations", "member_count", "updated_at")
ACME = {"id": "o1", "member_count": 2, "updated_at": "then"}


def mutation(root: str, *steps: Step, by: Model | None = None) -> Event:
    """The one event of a transaction that is annotated as one mutation."""
    return render_one(transaction(*steps, said={"root": root}), by)


@pytest.mark.requirement("C-07", "S1-25", "S1-02")
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (inserted(USERS, id="u1"), "child_entity_added"),
        (updated(USERS, {"id": "u1"}, email="x"), "related_entity_updated"),
        (deleted(USERS, id="u1"), "parent_entity_deleted"),
    ],
)
def test_other_rows_that_a_mutation_updated_are_in_its_cascade(step: Step, reason: str) -> None:
    event = mutation("User:u1", updated(ORGANIZATIONS, ACME, member_count=3), step)
    assert event["entity"]["entity_type"] == "User"
    assert event["sequence_number"] == FIRST + 1
    assert event["cascade"] == EMPTY | {
        "updated": [
            {
                "entity_type": "Organization",
                "entity_id": "o1",
                "changes": ["member_count"],
                "reason": reason,
            }
        ]
    }


@pytest.mark.requirement("C-07", "S1-25")
def test_a_row_that_a_mutation_added_is_listed_with_all_its_fields() -> None:
    event = mutation(
        "User:u1", updated(USERS, {"id": "u1"}, email="x"), inserted(POSTS, id="p1", user_id="u1")
    )
    assert event["cascade"]["updated"] == [
        {
            "entity_type": "Post",
            "entity_id": "p1",
            "changes": ["id", "user_id"],
            "reason": "child_entity_added",
        }
    ]


@pytest.mark.requirement("C-07", "S1-26")
def test_a_mutation_tells_what_was_deleted_with_its_root_from_what_was_deleted_beside() -> None:
    event = mutation(
        "User:u1",
        deleted(POSTS, id="p0", user_id="u0"),
        deleted(COMMENTS, id="c1", post_id="p1", author_id=None),
        deleted(POSTS, id="p1", user_id="u1"),
        deleted(USERS, id="u1"),
    )
    assert [(ids([entry]), entry["reason"]) for entry in event["cascade"]["deleted"]] == [
        (["Post:p0"], "related_entity_deleted"),
        (["Comment:c1"], "parent_deleted"),
        (["Post:p1"], "parent_deleted"),
    ]


@pytest.mark.requirement("C-07")
def test_a_parent_that_was_deleted_beside_its_updated_child_is_a_related_entity() -> None:
    event = mutation(
        "Post:p1",
        updated(POSTS, {"id": "p1", "user_id": "u1"}, user_id=None),
        deleted(USERS, id="u1"),
    )
    assert event["cascade"]["deleted"] == [
        {"entity_type": "User", "entity_id": "u1", "reason": "related_entity_deleted"}
    ]


@pytest.mark.requirement("C-07")
def test_all_changes_of_a_row_are_one_entry() -> None:
    first = {"id": "p1", "user_id": None}
    event = mutation(
        "User:u1",
        inserted(USERS, id="u1"),
        updated(ORGANIZATIONS, ACME, updated_at="now"),
        updated(ORGANIZATIONS, ACME, member_count=3, updated_at="later"),
        inserted(POSTS, **first),
        updated(POSTS, first, user_id="u1"),
        deleted(COMMENTS, id="c1", post_id="p", author_id=None),
        inserted(COMMENTS, id="c1", post_id="p", author_id="u1"),
        updated(COMMENTS, {"id": "c2", "post_id": "p"}, post_id="q"),
        deleted(COMMENTS, id="c2", post_id="q", author_id=None),
    )
    told = {ids([entry])[0]: entry for entry in event["cascade"]["updated"]}
    assert {entity: entry["changes"] for entity, entry in told.items()} == {
        "Organization:o1": ["updated_at", "member_count"],
        "Post:p1": ["id", "user_id"],
        "Comment:c1": ["id", "post_id", "author_id"],
    }
    assert ids(event["cascade"]["deleted"]) == ["Comment:c2"]


def combined(*steps: Step, root: str = "User:u1", at: int) -> Event:
    """What several changes of the root add up to, in the place of one of them."""
    event = mutation(root, *steps)
    assert event["cascade"] == EMPTY
    assert event["sequence_number"] == FIRST + at
    assert event["event_id"] == transaction(*steps)[at].id
    return event


@pytest.mark.requirement("C-07", "S1-02")
def test_several_changes_of_the_root_are_one_event_of_what_they_add_up_to() -> None:
    old = {"id": "u1", "email": "a", "status": "new"}
    mid, new = old | {"email": "b"}, old | {"email": "b", "status": "active"}

    created = combined(inserted(USERS, **old), updated(USERS, old, email="b"), at=0)
    assert created["event_type"] == "entity:created"
    assert created["operation"]["after"] == mid
    assert "before" not in created["operation"]

    changed = combined(updated(USERS, old, email="b"), updated(USERS, mid, status="active"), at=1)
    assert changed["event_type"] == "entity:updated"
    assert (changed["operation"]["before"], changed["operation"]["after"]) == (old, new)
    assert changed["operation"]["changed_fields"] == ["email", "status"]

    gone = combined(updated(USERS, old, email="b"), deleted(USERS, **mid), at=1)
    assert gone["event_type"] == "entity:deleted"
    assert gone["operation"]["before"] == old

    replaced = combined(deleted(USERS, **old), inserted(USERS, **new), at=1)
    assert replaced["event_type"] == "entity:updated"
    assert replaced["operation"]["changed_fields"] == ["email", "status"]

    fleeting = combined(inserted(USERS, **old), deleted(USERS, **old), at=1)
    assert fleeting["event_type"] == "entity:deleted"


@pytest.mark.requirement("C-07", "S1-42")
def test_an_event_stands_at_the_change_that_is_called_as_it_is() -> None:
    """So that who asks for inserts is told of everything that was created."""
    old = {"id": "u1", "email": "a"}
    again = [deleted(USERS, **old), inserted(USERS, **old), updated(USERS, old, email="b")]
    assert combined(*again, at=2)["event_type"] == "entity:updated"
    back = [updated(USERS, old, email="b"), deleted(USERS, **old), inserted(USERS, **old)]
    assert combined(*back, at=0)["event_type"] == "entity:updated"
    thrice = [inserted(USERS, **old), deleted(USERS, **old), inserted(USERS, **old)]
    assert combined(*thrice, at=0)["event_type"] == "entity:created"


def touched(*, id: str, unchanged: Sequence[str] = (), **row: Any) -> Step:
    """An update of which the source sent nothing but the new row."""
    fields = {"before_kind": BeforeKind.NONE, "unchanged": tuple(unchanged)}
    return Step(Op.UPDATE, USERS, None, {"id": id, **row}, fields)


def moved(old: str, new: str, **row: Any) -> Step:
    """An update of a key, of which the source sent the old key."""
    return Step(Op.UPDATE, USERS, {"id": old}, {"id": new, **row}, {"before_kind": BeforeKind.KEY})


@pytest.mark.requirement("C-03", "S1-16")
def test_what_is_known_of_a_row_is_told_though_its_deletion_did_not_tell_it() -> None:
    told = model(EntityType(name="User", table="users", identifier="email", tenant="status"))
    gone = deleted_by_key(USERS, id="u1")
    for steps in ([touched(id="u1", email="b", status="acme"), gone],
                  [inserted(USERS, id="u1", email="b", status="acme"), gone]):  # fmt: skip
        event = mutation("User:u1", *steps, by=told)
        assert event["event_type"] == "entity:deleted"
        assert event["operation"]["before"] == {"id": "u1"}
        assert event["metadata"] == {"before_kind": "key"}
        assert event["entity"] == {
            "entity_type": "User",
            "entity_id": "u1",
            "entity_identifier": "b",
            "tenant_id": "acme",
        }


@pytest.mark.requirement("C-03")
def test_of_several_old_rows_the_one_that_tells_most_is_shown() -> None:
    old, mid = {"id": "u1", "email": "a"}, {"id": "u1", "email": "b"}
    gone = combined(touched(id="u1", email="b"), deleted(USERS, **mid), at=1)
    assert gone["operation"]["before"] == mid
    assert gone["metadata"] == {}
    gone = combined(updated(USERS, old, email="b"), deleted_by_key(USERS, id="u1"), at=1)
    assert (gone["operation"]["before"], gone["metadata"]) == (old, {})
    # A whole row that comes later is not the row before the first update.
    changed = combined(touched(id="u1", email="b"), updated(USERS, mid, status="x"), at=1)
    assert changed["operation"]["before"] is None
    assert changed["operation"]["changed_fields"] == ["email", "status"]
    assert changed["metadata"] == {"before_kind": "none"}


# --- changed keys --------------------------------------------------------------------------------


@pytest.mark.requirement("C-07", "S1-02")
@pytest.mark.parametrize("root", ["User:1", "User:2"])
def test_a_root_whose_key_changes_may_be_called_by_either_key(root: str) -> None:
    event = combined(moved("1", "2", email="a"), root=root, at=0)
    assert (ids([event]), event["metadata"]) == (["User:2"], {"before_kind": "key"})
    event = combined(touched(id="1", email="b"), moved("1", "2", email="b"), root=root, at=1)
    assert event["event_type"] == "entity:updated"
    assert ids([event]) == ["User:2"]
    assert event["operation"]["before"] == {"id": "1"}
    assert event["operation"]["after"] == {"id": "2", "email": "b"}
    assert event["operation"]["changed_fields"] == ["id", "email"]
    whole = {"id": "1", "email": "a"}
    steps = [updated(USERS, whole, id="2"), updated(USERS, whole | {"id": "2"}, email="b")]
    event = combined(*steps, root=root, at=1)
    assert event["operation"]["before"] == whole
    assert event["operation"]["changed_fields"] == ["id", "email"]


@pytest.mark.requirement("C-07")
def test_a_row_that_is_deleted_under_another_key_is_told_under_the_one_that_was_known() -> None:
    steps = [moved("1", "2", email="a"), deleted_by_key(USERS, id="2")]
    for root in ("User:1", "User:2"):
        assert ids([combined(*steps, root=root, at=1)]) == ["User:1"]
    event = mutation("Post:p", inserted(POSTS, id="p"), *steps)
    assert ids(event["cascade"]["deleted"]) == ["User:1"]


@pytest.mark.requirement("C-07")
def test_a_key_that_was_given_up_may_be_anothers() -> None:
    event = mutation("User:1", moved("1", "2"), inserted(USERS, id="1"))
    assert (event["event_type"], ids([event])) == ("entity:updated", ["User:2"])
    assert [(ids([each]), each["reason"]) for each in event["cascade"]["updated"]] == [
        (["User:1"], "child_entity_added")
    ]
    event = mutation("User:2", deleted_by_key(USERS, id="2"), moved("1", "2"))
    assert (event["event_type"], ids([event])) == ("entity:deleted", ["User:2"])
    assert ids(event["cascade"]["updated"]) == ["User:2"]


def test_a_row_is_the_same_whatever_id_the_model_gives_it() -> None:
    told = model(EntityType(name="User", table="users", id=("email",)))
    row = {"id": "1", "email": "a"}
    steps = [inserted(USERS, **row), updated(USERS, row, email="b"), deleted_by_key(USERS, id="1")]
    for root in ("User:a", "User:b"):
        event = mutation(root, *steps, by=told)
        assert (event["event_type"], event["cascade"]) == ("entity:deleted", EMPTY)


# --- rows that come and go, rows without keys ----------------------------------------------------


@pytest.mark.requirement("C-07")
@pytest.mark.parametrize("user_id", ["u1", "u9"])
def test_a_row_that_came_and_went_in_a_mutation_is_not_told(user_id: str) -> None:
    post = {"id": "p1", "user_id": user_id}
    steps = [inserted(POSTS, **post), deleted(POSTS, **post), deleted(USERS, id="u1")]
    event = mutation("User:u1", *steps, by=ASKED)
    assert event["cascade"]["deleted"] == event["cascade"]["updated"] == []
    assert [each["query"] for each in event["cascade"]["invalidations"]] == ["users"]


NOTES = make_entity_table("notes", "text", "user_id", references=[to("users", "user_id")], key=())


@pytest.mark.requirement("C-07")
def test_rows_without_a_key_are_each_listed() -> None:
    notes = [deleted(NOTES, text=text, user_id="u1") for text in ("a", "a", "b")]
    for said in (None, {"root": "User:u1"}):
        event = render_one(transaction(*notes, deleted(USERS, id="u1"), said=said))
        assert ids(event["cascade"]["deleted"]) == ["Note:"] * 3
    event = mutation(
        "User:u1", inserted(USERS, id="u1"), *(inserted(NOTES, text=text) for text in ("a", "a"))
    )
    assert ids(event["cascade"]["updated"]) == ["Note:"] * 2


def test_a_row_without_a_key_is_no_root() -> None:
    steps = [inserted(NOTES, text=text) for text in ("a", "b")]
    events = render(transaction(*steps, said={"root": "Note:"}))
    assert ids(events) == ["Note:"] * 2
    for event in events:
        assert event["metadata"]["annotation_error"].startswith("root Note: names no row")


def test_a_row_without_an_id_is_no_affected_entity() -> None:
    asked = Model(
        affected_entities=True,
        entities=(EntityType(name="Note", table="notes", queries=("notes",)),),
    )
    event = render_one(transaction(inserted(NOTES, text="a")), asked)
    assert event["cascade"]["invalidations"] == [{"query": "notes", "reason": "entity_created"}]


@pytest.mark.requirement("C-03")
def test_a_column_that_was_sent_once_is_known_of_the_root() -> None:
    partial = Step(Op.UPDATE, USERS, None, {"id": "u1", "status": "x"}, {"unchanged": ("email",)})
    event = combined(inserted(USERS, id="u1", email="long", status="new"), partial, at=0)
    assert event["operation"]["after"] == {"id": "u1", "email": "long", "status": "x"}
    assert event["metadata"] == {}


@pytest.mark.requirement("C-07")
@pytest.mark.parametrize("root", ["User:u2", "Account:u1", "u1", "", ["User", "u1"]])
def test_a_root_that_names_no_row_leaves_every_row_its_own_event(root: object) -> None:
    steps = [
        deleted(USERS, id="u1"),
        deleted(POSTS, id="p1", user_id="u1"),
        updated(ORGANIZATIONS, ACME, member_count=1),
    ]
    said = {"root": root, "trigger": "api_delete"}
    events = render(transaction(*steps, said=said))
    assert ids(events) == ["User:u1", "Organization:o1"]
    for event in events:
        assert event["operation"]["trigger"] == "api_delete"
        shown = root if isinstance(root, str) else '["User","u1"]'
        assert event["metadata"]["annotation_error"] == (
            f"root {shown} names no row of this transaction"
        )


def test_a_piece_of_a_large_transaction_says_that_it_is_one() -> None:
    changes = transaction(
        inserted(USERS, id="u1"), inserted(POSTS, id="p1"), said={"root": "User:u1"}
    )
    (event,) = render(changes[1:])
    assert event["metadata"]["annotation_error"] == (
        "root User:u1 names no row of this transaction, of which only a part is at hand"
    )


def test_two_things_that_are_wrong_with_an_annotation_are_both_told() -> None:
    said = {"root": "User:u2", "annotation_error": "not JSON"}
    (event,) = render(transaction(inserted(USERS, id="u1"), said=said))
    assert event["metadata"]["annotation_error"].startswith("not JSON; root User:u2 names no row")


def test_entities_of_one_name_in_two_tables_are_two() -> None:
    archived = make_entity_table("users", schema="archive")
    event = mutation("User:u1", inserted(USERS, id="u1", email="x"), deleted(archived, id="u1"))
    assert event["event_type"] == "entity:created"
    assert ids(event["cascade"]["deleted"]) == ["User:u1"]


@pytest.mark.requirement("S1-53")
def test_a_mutation_whose_operation_is_left_out_makes_no_event() -> None:
    changes = transaction(
        updated(USERS, {"id": "u1"}, email="x"), inserted(POSTS, id="p1"), said={"root": "User:u1"}
    )
    some = Model().selected(Selection(exclude_operations=("UPDATE",)))
    assert render(changes, some) == []
    some = Model().selected(Selection(exclude_operations=("CREATE",)))
    assert ids(render_one(changes, some)["cascade"]["updated"]) == ["Post:p1"]


# --- invalidations -------------------------------------------------------------------------------


def invalidations(event: Event) -> list[tuple[str, str]]:
    return [(each["query"], each["reason"]) for each in event["cascade"]["invalidations"]]


ASKED = model(
    EntityType(name="User", table="users", queries={"user": ("UPDATE",), "users": ()}),
    EntityType(name="Post", table="posts", queries=("userPosts", "users")),
    EntityType(name="OrderItem", table="items", queries=("items",)),
)
ITEMS = make_entity_table("items")


@pytest.mark.requirement("S1-27", "C-07")
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (inserted(USERS, id="1"), [("users", "entity_created")]),
        (
            updated(USERS, {"id": "1"}, email="x"),
            [("user", "entity_updated"), ("users", "entity_updated")],
        ),
        (deleted(USERS, id="1"), [("users", "entity_deleted")]),
    ],
)
def test_an_entitys_queries_are_invalidated_by_its_operation(
    step: Step, expected: list[tuple[str, str]]
) -> None:
    assert invalidations(render_one(transaction(step), ASKED)) == expected


@pytest.mark.requirement("S1-27", "C-07")
def test_a_folded_childs_queries_are_invalidated_each_query_once() -> None:
    steps = [deleted(POSTS, id=f"p{n}", user_id="u1") for n in (1, 2)]
    event = render_one(transaction(*steps, deleted(USERS, id="u1")), ASKED)
    assert invalidations(event) == [("users", "entity_deleted"), ("userPosts", "parent_deleted")]


@pytest.mark.requirement("S1-27")
def test_the_queries_of_related_entities_are_invalidated_by_what_happened_to_them() -> None:
    event = mutation(
        "Tag:1",
        inserted(make_entity_table("tags"), id="1"),
        updated(USERS, {"id": "u1"}, email="x"),
        deleted(POSTS, id="p1", user_id=None),
        inserted(ITEMS, id="i1"),
        by=ASKED,
    )
    assert invalidations(event) == [
        ("user", "user_updated"),
        ("users", "user_updated"),
        ("userPosts", "post_deleted"),
        ("items", "order_item_created"),
    ]


@pytest.mark.requirement("S1-27")
def test_invalidations_name_the_entity_that_is_affected_when_asked() -> None:
    asked = msgspec.structs.replace(ASKED, affected_entities=True)
    for _ in range(2):
        event = mutation(
            "User:u1",
            updated(USERS, {"id": "u1"}, status="x"),
            deleted(POSTS, id="p1", user_id="u1"),
            by=asked,
        )
        assert event["cascade"]["invalidations"][-1] == {
            "query": "userPosts",
            "reason": "post_deleted",
            "affected_entities": ["User:u1"],
        }
    one, two = render(transaction(inserted(USERS, id="a"), inserted(USERS, id="b")), asked)
    assert one["cascade"]["invalidations"][0]["affected_entities"] == ["User:a"]
    assert two["cascade"]["invalidations"][0]["affected_entities"] == ["User:b"]


# --- size ----------------------------------------------------------------------------------------


def test_a_long_chain_folds_without_recursion() -> None:
    depth = 5000
    steps = [folder(str(n), str(n + 1)) for n in range(depth)]
    assert {top: len(below) for top, below in families(*steps).items()} == {
        f"Folder:{depth - 1}": depth - 1
    }
    steps[-1] = folder(str(depth - 1), "0")
    assert {top: len(below) for top, below in families(*steps).items()} == {"Folder:0": depth - 1}


def test_many_families_that_share_what_hangs_on_them_fold_in_no_time() -> None:
    count = 8000
    own = [deleted(NODES, id=f"h{n}", a=f"h{n}", b=None) for n in range(count)]
    chain = [deleted(NODES, id=f"c{n}", a=f"c{n - 1}", b=f"h{n}") for n in range(count)]
    changes = transaction(*own, *chain)
    began = time.process_time()
    events = Entity().render(changes)
    assert time.process_time() - began < 4  # the square of these would be ten seconds
    assert len(events) == count


def tables(*names: str) -> list[Table]:
    return [make_entity_table(name) for name in names]


@pytest.mark.parametrize("said", [None, {"root": "User:u1"}])
def test_rows_that_have_nothing_to_do_with_each_other_are_kept_apart(said: Any) -> None:
    tags, notes = tables("tags", "notes")
    steps = [deleted(tags, id="1"), deleted(notes, id="1"), deleted(USERS, id="u1")]
    events = render(transaction(*steps, said=said))
    assert ids(events) == (["User:u1"] if said else ["Tag:1", "Note:1", "User:u1"])
