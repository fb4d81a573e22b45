"""Tables as entities: what a model says, what it leaves to the table, and what it may not say."""

import pickle
from typing import Any

import msgspec
import pytest

from headrace.change.event import Column, Table
from headrace.errors import ConfigError
from headrace.model import EntityType, Model, Parent, Selection, entity_name

USERS = ("id", "email", "tenant_id", "org_id")


def table(name: str = "users", *columns: str, schema: str = "public") -> Table:
    described = tuple(Column(each, "text", key=each == "id") for each in columns or USERS)
    return Table("shop", "postgres", "o", "shop", schema, name, described)


def user(**settings: Any) -> EntityType:
    return EntityType(**({"name": "User", "table": "public.users"} | settings))


# --- what it derives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("users", "User"),
        ("user", "User"),
        ("order_items", "OrderItem"),
        ("orders_archive", "OrdersArchive"),
        ("tb_user", "User"),
        ("tbl_users", "User"),
        ("categories", "Category"),
        ("ties", "Tie"),
        ("addresses", "Address"),
        ("address", "Address"),
        ("boxes", "Box"),
        ("branches", "Branch"),
        ("dishes", "Dish"),
        ("statuses", "Status"),
        ("status", "Status"),
        ("houses", "House"),
        ("analysis", "Analysis"),
        ("invoices", "Invoice"),
        ("people", "Person"),
        ("News", "News"),
        ("OrderItems", "OrderItem"),
        ("order-items", "OrderItem"),
        ("Größen", "Größen"),
        ("表", "表"),
        ("s", "S"),
        ("__", "__"),
    ],
)
def test_an_entity_is_named_after_its_table(name: str, expected: str) -> None:
    assert entity_name(name) == expected


def test_what_a_model_does_not_say_comes_from_the_table() -> None:
    entity = Model().entity(table("order_items", "id", "total"))
    assert entity == EntityType(name="OrderItem", table="public.order_items", id=("id",))


def test_what_a_model_says_counts() -> None:
    given = user(name="Member", id=("email",), identifier="email", tenant="org_id")
    assert Model(entities=(given,), tenant="tenant_id").entity(table()) == given


@pytest.mark.requirement("S1-16")
def test_the_tenant_column_counts_for_every_table_that_has_it() -> None:
    model = Model(tenant="tenant_id")
    assert model.entity(table()).tenant == "tenant_id"
    assert model.entity(table("tags", "id")).tenant is None


def test_a_table_is_named_with_its_schema_or_in_any() -> None:
    anywhere = Model(entities=(user(name="Member", table="users"),))
    assert anywhere.entity(table(schema="sales")).name == "Member"
    here = Model(entities=(user(name="Member", table="users"), user(name="Buyer", table="a.users")))
    assert here.entity(table(schema="a")).name == "Buyer"
    assert here.entity(table(schema="b")).name == "Member"
    assert Model(entities=(user(name="X", table="a.users"),)).entity(table()).name == "User"


def test_queries_are_invalidated_by_the_operations_they_name() -> None:
    entity = user(queries={"user": ("UPDATE",), "users": ()})
    assert entity.invalidated("UPDATE") == ("user", "users")
    assert entity.invalidated("DELETE") == ("users",)
    assert user(queries=("b", "a")).invalidated("CREATE") == ("b", "a")


@pytest.mark.requirement("S1-52", "S1-53")
def test_a_selection_leaves_out_what_it_excludes_and_what_it_does_not_name() -> None:
    everything = Selection()
    assert everything.includes("User")
    assert everything.emits("CREATE")
    some = Selection(
        entities=("User", "Post"),
        exclude_entities=("Post",),
        operations=("UPDATE", "DELETE"),
        exclude_operations=("DELETE",),
    )
    assert [name for name in ("User", "Post", "Tag") if some.includes(name)] == ["User"]
    assert [name for name in ("CREATE", "UPDATE", "DELETE") if some.emits(name)] == ["UPDATE"]
    assert Model().selected(some).selection == some


def test_a_model_is_a_value_that_travels() -> None:
    model = Model(
        name="acme-api",
        instances={"shop": "prod-1"},
        entities=(user(queries={"user": ("UPDATE",)}, fields={"UPDATE": ("email",)}),),
    )
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert hash(again) == hash(model)
    assert {model: 1}[again] == 1
    assert (again != model) is False  # what a struct compares by itself are addresses
    assert model != Model()
    assert msgspec.structs.replace(model, name="x") != model


def test_models_differ_when_their_queries_stand_in_another_order() -> None:
    one, other = user(queries={"a": (), "b": ()}), user(queries={"b": (), "a": ()})
    assert one != other
    assert Model(entities=(one,)) != Model(entities=(other,))
    assert one != Model()


# --- what it refuses -----------------------------------------------------------------------------

ORGANIZATIONS = table("organizations", "id", "slug")
TABLES = [table(), ORGANIZATIONS, table("posts", "id", "user_id")]


def problems(model: Model) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        model.check(TABLES)
    return str(caught.value).split("\n")


def test_a_model_of_tables_that_there_are_is_accepted() -> None:
    Model().check([])
    Model().check(TABLES)
    Model(
        tenant="tenant_id",
        entities=(
            user(
                id=("id",),
                identifier="email",
                tenant="tenant_id",
                version="id",
                soft_delete="org_id",
                parents=(
                    Parent(entity="Organization", columns=("org_id",)),
                    Parent(entity="User", columns=("email",), parent_columns=("email",)),
                ),
                queries=("users",),
                fields={"UPDATE": ("email",)},
            ),
            EntityType(name="Entry", table="posts"),
        ),
        selection=Selection(entities=("User", "Entry"), exclude_entities=("Organization",)),
    ).check(TABLES)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"table": "public.user"},
            "table: no table called public.user; did you mean public.users?",
        ),
        ({"id": ("idd",)}, "id: public.users has no column idd; did you mean id?"),
        (
            {"identifier": "mail"},
            "identifier: public.users has no column mail; did you mean email?",
        ),
        (
            {"tenant": "tennant_id"},
            "tenant: public.users has no column tennant_id; did you mean tenant_id?",
        ),
        (
            {"version": "xyz"},
            "version: public.users has no column xyz; there are: id, email, tenant_id, org_id",
        ),
        (
            {"soft_delete": "og_id"},
            "soft_delete: public.users has no column og_id; did you mean org_id?",
        ),
        (
            {"fields": {"UPDATE": ("email", "tenant")}},
            "fields.UPDATE: public.users has no column tenant; did you mean tenant_id?",
        ),
        (
            {"parents": (Parent(entity="Organisation", columns=("org_id",)),)},
            "parents[0].entity: no entity called Organisation; did you mean Organization?",
        ),
        (
            {"parents": (Parent(entity="Organization", columns=("orgid",)),)},
            "parents[0].columns: public.users has no column orgid; did you mean org_id?",
        ),
        (
            {
                "parents": (
                    Parent(entity="Organization", columns=("org_id",), parent_columns=("slg",)),
                )
            },
            "parents[0].parent_columns: public.organizations has no column slg; did you mean slug?",
        ),
        (
            {"parents": (Parent(entity="Organization", columns=("org_id", "email")),)},
            "parents[0].columns: 2 columns cannot name a row of Organization by id; "
            "give one for each",
        ),
    ],
)
def test_a_mistake_is_named_with_its_setting_and_what_was_meant(
    settings: dict[str, Any], problem: str
) -> None:
    assert problems(Model(entities=(user(**settings),))) == [
        f"headrace.model.entities.User.{problem}"
    ]


@pytest.mark.parametrize("second", ["public.users", "users"])
def test_a_table_is_one_entity(second: str) -> None:
    twice = Model(entities=(user(), EntityType(name="Member", table=second)))
    assert problems(twice) == [
        "headrace.model.entities.Member.table: public.users is already the table of User; "
        "name it once"
    ]


@pytest.mark.requirement("S1-52")
def test_a_selection_names_entities_that_there_are() -> None:
    chosen = Model(selection=Selection(entities=("Usr",), exclude_entities=("Pst", "Post")))
    assert problems(chosen) == [
        "headrace.cdc.entities: no entity called Usr; did you mean User?",
        "headrace.cdc.exclude_entities: no entity called Pst; did you mean Post?",
    ]


def test_some_table_has_the_tenant_column() -> None:
    assert problems(Model(tenant="tenantid")) == [
        "headrace.model.tenant: no table has a column tenantid; did you mean tenant_id?"
    ]


def test_every_mistake_is_named_at_once() -> None:
    model = Model(
        tenant="x",
        entities=(user(id=("a",), identifier="b"), EntityType(name="Post", table="pots")),
    )
    assert [problem.partition(": ")[0] for problem in problems(model)] == [
        "headrace.model.tenant",
        "headrace.model.entities.User.id",
        "headrace.model.entities.User.identifier",
        "headrace.model.entities.Post.table",
    ]
