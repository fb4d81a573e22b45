"""One file, checked whole before anything starts; what it hides never prints."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace import plugins
from headrace.config import (
    CdcSection,
    Config,
    PipelineSection,
    ServerSection,
    TlsSection,
    WebSocketSection,
    load,
    parse,
    sink_class,
    sink_types,
    source_class,
    source_types,
)
from headrace.config.fields import settings_of
from headrace.config.settings import TelemetrySection
from headrace.errors import ConfigError
from headrace.model import EntityType, Model, Parent, Selection
from headrace.secret import Secret
from headrace.sinks.destination import DestinationSink

ROOT = Path(__file__).parents[2]

PASSWORD = "hunter2-p@ss/word"
TYPES = ", ".join(source_types())
SOURCE = """
sources:
  shop: {type: postgres, url: "postgresql://app:${PGPASSWORD}@db/shop"}
"""

Load = Callable[[str], Config]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a config from its text."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.delenv("ABSENT", raising=False)

    def loading(text: str) -> Config:
        file = tmp_path / "headrace.yaml"
        file.write_text(text)
        return load(file)

    return loading


def problems(loading: Load, text: str) -> list[str]:
    """What a config is refused for, one problem a line."""
    with pytest.raises(ConfigError) as caught:
        loading(text)
    return str(caught.value).split("\n")


# --- what it says --------------------------------------------------------------------------------


def test_a_source_alone_is_a_whole_config(config: Load, tmp_path: Path) -> None:
    loaded = config(SOURCE)
    [source] = loaded.sources
    assert source.name == "shop"
    assert loaded.server == ServerSection()
    assert loaded.cdc == CdcSection()
    assert loaded.data_dir == tmp_path / "data"


@pytest.mark.requirement("S1-51")
def test_cdc_says_whether_how_long_and_how_much_at_once(config: Load) -> None:
    loaded = config(SOURCE + "cdc: {enabled: false, retention_days: 7, batch_size: 50}")
    assert (loaded.cdc.enabled, loaded.cdc.retention_days, loaded.cdc.batch_size) == (False, 7, 50)
    assert (CdcSection().enabled, CdcSection().retention_days, CdcSection().batch_size) == (
        True,
        30,
        100,
    )


@pytest.mark.requirement("S1-51")
def test_the_storage_says_how_postgresql_is_captured(config: Load) -> None:
    assert config(SOURCE + "cdc: {storage: postgres_wal}").cdc == CdcSection() == config(SOURCE).cdc
    assert type(config(SOURCE).sources[0]) is source_class("postgres")
    chosen = config(SOURCE + "cdc: {storage: event_table}")
    assert type(chosen.sources[0]) is source_class("postgres_events")
    assert chosen.cdc.storage == "event_table"
    mixed = config(
        "sources: {shop: {type: postgres_events, url: dbname=shop}}\ncdc: {storage: postgres_wal}"
    )
    assert type(mixed.sources[0]) is source_class("postgres_events")


@pytest.mark.requirement("S1-51")
def test_a_storage_that_there_is_not_is_refused(config: Load) -> None:
    assert problems(config, SOURCE + "cdc: {storage: kafka}") == [
        "headrace.cdc: storage kafka: it is not supported yet; set postgres_wal or event_table"
    ]
    assert problems(config, SOURCE + "cdc: {storage: wal}") == [
        "headrace.cdc: storage wal: there is no such storage; set postgres_wal or event_table"
    ]


def test_a_relative_data_dir_begins_at_the_config_file(config: Load, tmp_path: Path) -> None:
    assert config(SOURCE + "data_dir: some/where").data_dir == tmp_path / "some" / "where"
    assert config(SOURCE + "data_dir: /var/headrace").data_dir == Path("/var/headrace")


def test_a_section_left_empty_has_its_defaults(config: Load) -> None:
    assert config(SOURCE + "server:").server == ServerSection()


def test_variables_come_from_the_environment(config: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "4000")
    loaded = config(SOURCE + 'server: {port: "${PORT}", host: "${ABSENT:-localhost}"}')
    assert loaded.server == ServerSection(port=4000, host="localhost")


def test_an_empty_variable_has_the_default(config: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "")
    assert config(SOURCE + 'server: {host: "${HOST:-localhost}"}').server.host == "localhost"


def test_a_variable_keeps_characters_that_mean_something_in_yaml(
    config: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", '/tmp/a: "b" #c')
    assert config(SOURCE + "data_dir: ${FOLDER}").data_dir == Path('/tmp/a: "b" #c')


def test_a_doubled_dollar_is_a_plain_one(config: Load) -> None:
    assert config(SOURCE + 'data_dir: "/tmp/$${HOME}"').data_dir == Path("/tmp/${HOME}")


def test_the_times_of_the_websocket_are_settings_of_the_server(config: Load) -> None:
    text = SOURCE + "server: {port: 4000, websocket: {ping_seconds: 5, pong_seconds: 12.5}}"
    server = config(text).server
    assert server == ServerSection(
        port=4000, websocket=WebSocketSection(ping_seconds=5, pong_seconds=12.5)
    )
    assert config(SOURCE + "server: {websocket: }").server == ServerSection()


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:3000"), ("::", "http://[::1]:3000"), ("h", "http://h:3000")],
)
def test_the_server_is_reached_at_an_address_even_when_it_listens_on_all(
    host: str, url: str
) -> None:
    assert ServerSection(host=host).url == url


# --- the pipeline --------------------------------------------------------------------------------

PLUGINS = ROOT / "tests" / "pipeline" / "plugins"
LAKE = SOURCE + "pipeline: {sinks: {lake: {type: folder, path: lake}}}\n"


@pytest.fixture
def folder_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sink `folder` known, as a file in headrace/sinks would."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)


def with_pipeline(**settings: object) -> str:
    """A config whose pipeline has these settings beside one sink."""
    section = {"sinks": {"lake": {"type": "folder", "path": "lake"}}, **settings}
    return SOURCE + f"pipeline: {msgspec.json.encode(section).decode()}"


@pytest.mark.usefixtures("folder_sink")
def test_a_sink_alone_is_a_whole_pipeline(config: Load, tmp_path: Path) -> None:
    loaded = config(LAKE)
    assert loaded.pipeline is not None
    [sink] = loaded.pipeline.sinks
    assert (sink.name, sink.tables) == ("lake", ())
    assert isinstance(sink, sink_class("folder"))
    assert vars_of(sink)["path"] == str(tmp_path / "lake")
    assert msgspec.structs.replace(loaded.pipeline, sinks=()) == PipelineSection()
    assert loaded.checkpoint_dir == tmp_path / "data" / "pipeline"
    assert config(SOURCE).pipeline is None


def vars_of(sink: object) -> dict[str, object]:
    """The settings of a sink."""
    assert dataclasses.is_dataclass(sink)
    return {field.name: getattr(sink, field.name) for field in dataclasses.fields(sink)}


@pytest.mark.usefixtures("folder_sink")
def test_any_setting_of_spark_is_passed_on_and_none_prints(config: Load) -> None:
    given = {"spark.executor.memory": "2g", "spark.executor.cores": 2, "spark.ui.enabled": True}
    loaded = config(with_pipeline(spark={**given, "spark.hadoop.key": "${PGPASSWORD}"})).pipeline
    assert loaded is not None
    assert {name: value.reveal() for name, value in loaded.spark.items()} == {
        "spark.executor.memory": "2g",
        "spark.executor.cores": "2",
        "spark.ui.enabled": "true",
        "spark.hadoop.key": PASSWORD,
    }
    assert PASSWORD not in repr(loaded)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "path"),
        ({"master": "local"}, "path"),
        ({"master": "spark://host:7077"}, {"url": "http://127.0.0.1:3000"}),
        ({"url": "https://feed"}, {"url": "https://feed"}),
        ({"master": "spark://host:7077", "url": "https://feed"}, {"url": "https://feed"}),
    ],
)
@pytest.mark.usefixtures("folder_sink")
def test_spark_reads_the_log_by_path_only_on_this_machine(
    config: Load, settings: dict[str, object], address: object
) -> None:
    loaded = config(with_pipeline(**settings))
    expected = {"path": str(loaded.log_dir)} if address == "path" else address
    assert loaded.log_address == expected


@pytest.mark.requirement("P-25")
@pytest.mark.parametrize("kind", ["tables", "history", "files"])
def test_a_local_folder_is_refused_on_a_cluster(config: Load, kind: str) -> None:
    def loaded(path: str, **settings: object) -> object:
        sinks = {"lake": {"type": kind, "path": path}}
        return config(with_pipeline(sinks=sinks, master="spark://host:7077", **settings))

    with pytest.raises(ConfigError, match=r"sinks\.lake\.path: .*lake is another folder on every"):
        loaded("lake")
    assert loaded("lake", shared_disk=True)
    if kind != "files":
        assert loaded("s3://bucket/lake")


@pytest.mark.parametrize("address", ["s3://bucket/data", "abfss://c@a.net/x", "file:///x"])
def test_the_data_folder_is_no_address(config: Load, address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(f"data_dir: {address}\n{SOURCE}")
    assert f"headrace: data_dir: {address} is an address" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("address", ["s3://bucket/x", "abfss://c@a.net/x", "hdfs:///x"])
@pytest.mark.usefixtures("folder_sink")
def test_checkpoints_may_be_in_a_storage_and_the_rest_stays_here(
    config: Load, address: str
) -> None:
    loaded = config(with_pipeline(checkpoint_dir=f"{address}/"))
    assert loaded.checkpoint_address == address
    assert loaded.checkpoint_dir == loaded.pipeline_dir
    here = config(with_pipeline(checkpoint_dir="notes"))
    assert (here.checkpoint_address, here.checkpoint_dir.name) == ("", "notes")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:///x", "file:///x is a folder of this machine"),
        ("s3a:/bucket/x", "s3a:/bucket/x is no address"),
        ("s3a:///x", "s3a:///x is no address"),
        ("s3a://key:hidden@bucket/x", "the address has a password in it"),
    ],
)
@pytest.mark.usefixtures("folder_sink")
def test_an_address_that_no_storage_has_is_refused(config: Load, address: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(with_pipeline(checkpoint_dir=address))
    assert f"pipeline: checkpoint_dir: {why}" in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.requirement("P-25")
@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "local-cluster[1,1,1024]"])
def test_dead_letters_on_a_local_disk_are_refused_on_a_cluster(config: Load, master: str) -> None:
    def loaded(**settings: object) -> object:
        sink = {"type": "webhook", "url": "https://example.org/hook", **settings}
        return config(with_pipeline(sinks={"hook": sink}, master=master))

    with pytest.raises(ConfigError, match=r"sinks\.hook\.dead_letters: the default, below"):
        loaded()
    with pytest.raises(ConfigError, match=r"sinks\.hook\.dead_letters: letters is another folder"):
        loaded(dead_letters="letters")
    assert loaded(dead_letters="s3://bucket/letters")


@pytest.mark.usefixtures("folder_sink")
def test_where_spark_runs_is_said_once(config: Load) -> None:
    with pytest.raises(ConfigError, match=r"spark\.master is set as master"):
        config(with_pipeline(spark={"spark.master": "spark://host:7077"}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"sinks": {"lake": {"type": "tabels"}}},
            'headrace.pipeline.sinks.lake.type: no type called "tabels"; there are: '
            + ", ".join(sorted([*sink_types(), "folder"])),
        ),
        (
            {"sinks": {"lake": {"type": "folder", "paht": "x", "path": "y"}}},
            "headrace.pipeline.sinks.lake: no setting called paht; did you mean path?",
        ),
        (
            {"sinks": {"lake": {"type": "folder"}}},
            "headrace.pipeline.sinks.lake.path: this setting is missing",
        ),
        (
            {"sinks": {"Lake": {"type": "folder", "path": "x"}}},
            "headrace.pipeline.sinks.Lake: this is not a valid name for a sink; "
            "use small letters, digits and _, a letter first, 41 at most",
        ),
        ({"sinks": {}}, "headrace.pipeline.sinks: this setting is missing; name at least one sink"),
        (
            {"spark": {"executor.memory": "2g"}},
            "headrace.pipeline.spark: executor.memory is not a setting of Spark; "
            "those begin with spark.",
        ),
        (
            {"spark": {"spark.x": [PASSWORD]}},
            "headrace.pipeline.spark.spark.x: expected text, a number, or true or false",
        ),
        (
            {"trigger_seconds": 0},
            "headrace.pipeline.trigger_seconds: expected a number > 0.0, got 0",
        ),
        ({"mastre": "x"}, "headrace.pipeline: no setting called mastre; did you mean master?"),
    ],
)
@pytest.mark.usefixtures("folder_sink")
def test_a_mistake_in_the_pipeline_is_named_with_its_setting(
    config: Load, settings: dict[str, object], problem: str
) -> None:
    assert problems(config, with_pipeline(**settings)) == [problem]


@pytest.mark.parametrize("other", ["lake", "./lake/", "lake/inner", "x/../lake"])
@pytest.mark.usefixtures("folder_sink")
def test_two_sinks_never_write_to_one_place(config: Load, other: str) -> None:
    sinks_given = {
        "lake": {"type": "folder", "path": "lake"},
        "audit": {"type": "folder", "path": other},
    }
    [problem] = problems(config, with_pipeline(sinks=sinks_given))
    assert re.match(r"headrace\.pipeline\.sinks\.audit\.path: the sink lake already", problem)
    sinks_given["audit"]["path"] = "lake2"
    assert config(with_pipeline(sinks=sinks_given)).pipeline is not None


def test_a_config_without_a_pipeline_never_loads_spark(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("sources: {shop: {type: postgres, url: 'dbname=x'}}")
    code = (
        "import sys, headrace.cli, headrace.config, headrace.run\n"
        "import headrace.operate.commands, headrace.operate.show\n"
        "headrace.config.load('headrace.yaml')\n"
        "assert not {'pyspark', 'pyarrow', 'deltalake'} & set(sys.modules), 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


# --- settings that were renamed ------------------------------------------------------------------


@pytest.fixture
def renamed(folder_sink: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`server.port` was once called `http_port`, and the sink's `path` was called `folder`."""
    monkeypatch.setattr(ServerSection, "RENAMED", {"http_port": "port"}, raising=False)
    monkeypatch.setattr(sink_class("folder"), "RENAMED", {"folder": "path"}, raising=False)


@pytest.mark.usefixtures("renamed")
def test_a_setting_may_have_its_old_name_and_a_warning_names_the_new_one(
    config: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks_given = {"lake": {"type": "folder", "folder": "lake"}}
    loaded = config(with_pipeline(sinks=sinks_given) + "\nserver: {http_port: 4000}")
    assert loaded.server.port == 4000
    assert loaded.pipeline is not None
    assert vars_of(loaded.pipeline.sinks[0])["path"] == str(tmp_path / "lake")
    assert loaded.warnings == (
        "headrace.server.http_port: this setting is now called port",
        "headrace.pipeline.sinks.lake.folder: this setting is now called path",
    )
    logged = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("headrace.config", "WARNING", warning) for warning in loaded.warnings]


@pytest.mark.usefixtures("renamed")
def test_a_setting_under_both_names_is_an_error(config: Load) -> None:
    assert problems(config, SOURCE + "server: {http_port: 4000, port: 4001}") == [
        "headrace.server: http_port is the old name of port; set port alone"
    ]


@pytest.mark.usefixtures("renamed")
def test_a_problem_with_a_renamed_setting_names_it_as_it_is_called_now(config: Load) -> None:
    [problem] = problems(config, SOURCE + "server: {http_port: many}")
    assert problem.startswith("headrace.server.port: expected a whole number")


@pytest.mark.parametrize("kind", ["postgres", "postgres_events"])
def test_snapshot_workers_may_be_called_copy_workers(config: Load, kind: str) -> None:
    text = f"sources: {{shop: {{type: {kind}, url: 'dbname=x', copy_workers: 3}}}}"
    loaded = config(text)
    assert vars_of(loaded.sources[0])["snapshot_workers"] == 3
    assert loaded.warnings == (
        "headrace.sources.shop.copy_workers: this setting is now called snapshot_workers",
    )


def test_warnings_are_no_setting(config: Load) -> None:
    [problem] = problems(config, SOURCE + "warnings: [x]")
    assert problem.startswith("headrace: no setting called warnings")


# --- the model -----------------------------------------------------------------------------------

MODEL = """
model:
  name: acme-api
  version: "2.1.0"
  tenant: tenant_id
  source_details: true
  instances: {shop: prod-primary-1}
  regions: {shop: us-east-1}
  affected_entities: true
  entities:
    User:
      table: public.users
      id: [id]
      identifier: email
      tenant: account_id
      version: version
      soft_delete: deleted_at
      parents: [{entity: Organization, columns: [org_id]}]
      queries: {user: [UPDATE], users: []}
      fields: {UPDATE: [email, status, updated_at], DELETE: [id, email, status]}
    Post: {table: public.posts, queries: [userPosts]}
"""


def test_a_model_says_what_tables_are(config: Load) -> None:
    assert config(SOURCE).model == Model()
    assert config(SOURCE + MODEL).model == Model(
        name="acme-api",
        version="2.1.0",
        tenant="tenant_id",
        source_details=True,
        instances={"shop": "prod-primary-1"},
        regions={"shop": "us-east-1"},
        affected_entities=True,
        entities=(
            EntityType(
                name="User",
                table="public.users",
                id=("id",),
                identifier="email",
                tenant="account_id",
                version="version",
                soft_delete="deleted_at",
                parents=(Parent(entity="Organization", columns=("org_id",)),),
                queries={"user": ("UPDATE",), "users": ()},
                fields={
                    "UPDATE": ("email", "status", "updated_at"),
                    "DELETE": ("id", "email", "status"),
                },
            ),
            EntityType(name="Post", table="public.posts", queries=("userPosts",)),
        ),
    )


@pytest.mark.requirement("S1-52", "S1-53")
@pytest.mark.parametrize("name", ["cdc_entities", "cdc_operations"])
def test_the_documents_choice_of_events_is_the_models(config: Load, name: str) -> None:
    seed = json.loads((ROOT / "tests" / "formats" / "seeds" / f"s1_{name}.json").read_text())
    loaded = config(f"{SOURCE}{MODEL}cdc: {json.dumps(seed['cdc'])}")
    chosen = {
        "cdc_entities": Selection(entities=("User", "Post"), exclude_entities=("AuditLog",)),
        "cdc_operations": Selection(
            operations=("UPDATE", "DELETE"), exclude_operations=("CREATE",)
        ),
    }
    assert loaded.model.selection == chosen[name]
    assert loaded.model == config(SOURCE + MODEL).model.selected(chosen[name])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "model: {nmae: x}",
            "headrace.model: no setting called nmae; did you mean name?",
        ),
        ("model: {selection: {}}", "headrace.model: no setting called selection; "),
        ("model: {version: 2.1}", "headrace.model.version: expected text, got 2.1"),
        ("model: {entities: [1]}", "headrace.model.entities: expected settings, got [1]"),
        (
            "model: {entities: {User: {}}}",
            "headrace.model.entities.User.table: this setting is missing",
        ),
        (
            "model: {entities: {User: {table: u, querys: []}}}",
            "headrace.model.entities.User: no setting called querys; did you mean queries?",
        ),
        (
            "model: {entities: {User: {table: u, queries: {user: [UPDATED]}}}}",
            "headrace.model.entities.User.queries: expected text matching regex "
            "'^(CREATE|UPDATE|DELETE)$'",
        ),
        (
            "model: {entities: {User: {table: u, fields: {READ: [a]}}}}",
            "headrace.model.entities.User.fields: expected text matching regex "
            "'^(CREATE|UPDATE|DELETE)$'",
        ),
        (
            "model: {entities: {User: {table: u, parents: [{entity: X, colums: [a]}]}}}",
            "headrace.model.entities.User.parents: ",
        ),
        (
            "model: {instances: {shp: x}}",
            "headrace.model.instances: no source called shp; did you mean shop?",
        ),
        ("model: {regions: {x: y}}", "headrace.model.regions: no source called x; there are: shop"),
        (
            "cdc: {operations: [READ]}",
            "headrace.cdc.operations: expected text matching regex '^(CREATE|UPDATE|DELETE)$'",
        ),
    ],
)
def test_a_mistake_in_the_model_is_named_with_its_setting(
    config: Load, text: str, problem: str
) -> None:
    [found] = problems(config, SOURCE + text)
    assert found.startswith(problem)


def test_an_entity_given_twice_is_not_silently_overwritten(config: Load) -> None:
    [problem] = problems(config, SOURCE + "model: {entities: {A: {table: a}, A: {table: b}}}")
    assert problem.endswith("A is given twice")


# --- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "sources: {shop: {type: postgres, url: u, tabels: []}}",
            "headrace.sources.shop: no setting called tabels; did you mean tables?",
        ),
        (
            SOURCE + "server: {prot: 1}",
            "headrace.server: no setting called prot; did you mean port?",
        ),
        (
            SOURCE + "pipeline: {}",
            "headrace.pipeline.sinks: this setting is missing; name at least one sink",
        ),
        (
            "sources: {shop: {type: postgress, url: u}}",
            'headrace.sources.shop.type: no type called "postgress"; there are: ' + TYPES,
        ),
        (
            "sources: {shop: {url: u}}",
            "headrace.sources.shop.type: this setting is missing; there are: " + TYPES,
        ),
        ("sources: {shop: {type: postgres}}", "headrace.sources.shop.url: this setting is missing"),
        ("{}", "headrace.sources: this setting is missing; name at least one source"),
        ("sources: [1]", "headrace.sources: expected settings, got [1]"),
        ("hello", 'headrace: expected settings, got "hello"'),
        (SOURCE + "server: 3000", "headrace.server: expected settings, got 3000"),
        (
            SOURCE + "server: {port: abc}",
            'headrace.server.port: expected a whole number, got "abc"',
        ),
        (
            SOURCE + "server: {port: '3000'}",
            'headrace.server.port: expected a whole number, got "3000"',
        ),
        (
            SOURCE + "server: {port: 70000}",
            "headrace.server.port: expected a whole number <= 65535, got 70000",
        ),
        (SOURCE + "server: {port: }", "headrace.server.port: expected a whole number, got nothing"),
        (
            SOURCE + "server: {websocket: {ping: 1}}",
            "headrace.server.websocket: no setting called ping; did you mean ping_seconds?",
        ),
        (
            SOURCE + "server: {websocket: {ping_seconds: 90}}",
            "headrace.server.websocket.ping_seconds: expected a number <= 60.0, got 90",
        ),
        (
            SOURCE + "server: {websocket: {pong_seconds: 0}}",
            "headrace.server.websocket.pong_seconds: expected a number > 0.0, got 0",
        ),
        (
            SOURCE + "server: {websocket: {held_seconds: 100000}}",
            "headrace.server.websocket.held_seconds: expected a number <= 86400.0, got 100000",
        ),
        (
            SOURCE + "server: {websocket: {degraded_events: 20000}}",
            "headrace.server.websocket: degraded_events 20000 is above critical_events 10000; "
            "set it to at most that",
        ),
        (
            SOURCE + "server: {websocket: 3}",
            "headrace.server.websocket: expected settings, got 3",
        ),
        (
            SOURCE + "cdc: {enabled: 1}",
            "headrace.cdc.enabled: expected true or false, got 1",
        ),
        (
            SOURCE + "cdc: {retention_days: 0}",
            "headrace.cdc.retention_days: expected a number > 0.0, got 0",
        ),
        (
            "sources: {shop: {type: postgres, url: u, tables: public.*}}",
            'headrace.sources.shop.tables: expected a list, got "public.*"',
        ),
        (
            "sources: {shop: {type: postgres, url: nonsense}}",
            "headrace.sources.shop: the url of source shop is no connection string; "
            "write postgresql://user:password@host/database",
        ),
        (
            "sources: {shop: {type: postgres, url: 'dbname=x', snapshot_workers: 0}}",
            "headrace.sources.shop.snapshot_workers: expected a whole number >= 1, got 0",
        ),
        (
            "sources: {shop: {type: postgres, url: 'dbname=x', slot: Mine}}",
            "headrace.sources.shop.slot: expected text matching regex '^[a-z0-9_]{0,63}$', "
            'got "Mine"',
        ),
        (
            'sources: {shop: {type: postgres, url: "${ABSENT}"}}',
            "headrace.sources.shop.url: the environment variable ABSENT is not set",
        ),
        (
            SOURCE + 'data_dir: "${A-b}"',
            "headrace.data_dir: cannot read ${A-b}; write ${NAME} or ${NAME:-default}, "
            "and $${ for a plain ${",
        ),
    ],
)
def test_a_mistake_is_named_with_its_setting(config: Load, text: str, problem: str) -> None:
    assert problems(config, text) == [problem]


@pytest.mark.parametrize("name", ["Shop", "1shop", "shop-1", "s" * 42, "sh op"])
def test_a_source_has_a_plain_name(config: Load, name: str) -> None:
    text = f'sources: {{"{name}": {{type: postgres, url: "postgresql://db/shop"}}}}'
    [problem] = problems(config, text)
    assert problem.startswith(f"headrace.sources.{name}: this is not a valid name")


def test_every_mistake_is_named_at_once(config: Load) -> None:
    text = "sources: {shop: {type: postgres, slto: x}}\nserver: {port: x}\ncdc: {on: true}\nx: 1"
    found = problems(config, text)
    assert [problem.partition(":")[0] for problem in found] == [
        "headrace.sources.shop",
        "headrace.sources.shop.url",
        "headrace.server.port",
        "headrace.cdc",
        "headrace",
    ]


def test_a_setting_given_twice_is_not_silently_overwritten(config: Load) -> None:
    text = "sources: {}\nsources: {shop: {type: postgres, url: u}}"
    [problem] = problems(config, text)
    assert problem.endswith("is not YAML: line 2, column 1: sources is given twice")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file .*absent\.yaml"):
        load(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"headrace\.yaml"):
        load(tmp_path / "headrace.yaml")


def test_what_no_yaml_means_is_placed(config: Load) -> None:
    [problem] = problems(config, "sources: {shop: [}")
    assert "line 1, column 18" in problem


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        "sources: &a [*a]",
        "a: &a {b: *a}",
        "a: 2026-13-01",
        "a: !!timestamp x",
        "a: !!int x",
        "? [a]\n: b",
        r'data_dir: "a\0b"',
        r'data_dir: "\ud800"',
        "a: &a [" + "x," * 999 + "]\nb: &b [" + "*a," * 999 + "]\nc: [" + "*b," * 999 + "]",
    ],
)
def test_a_file_that_yaml_stumbles_over_is_named(config: Load, text: str) -> None:
    [problem] = problems(config, text)
    assert "headrace.yaml is " in problem
    assert len(problem) < 300


def test_an_unknown_source_is_answered_with_the_nearest(config: Load) -> None:
    with pytest.raises(ConfigError, match=r"no source called shp; did you mean shop\?"):
        config(SOURCE).source("shp")


# --- what it hides -------------------------------------------------------------------------------


def test_a_secret_never_prints(config: Load) -> None:
    loaded = config(SOURCE)
    [source] = loaded.sources
    for text in (repr(loaded), str(loaded), repr(source), str(source), f"{source}"):
        assert PASSWORD not in text


@pytest.mark.parametrize(
    "text",
    [
        f'sources: {{shop: {{type: postgres, url: ["postgresql://app:{PASSWORD}@db/shop"]}}}}',
        f'sources: {{shop: {{type: "postgresql://app:{PASSWORD}@db/shop"}}}}',
        f'server: {{port: "postgresql://app:{PASSWORD}@db/shop"}}',
        'server: {port: "${PGPASSWORD}"}',
        'sources: {shop: {type: "${PGPASSWORD}"}}',
        f'sources: {{shop: {{type: postgres, url: "postgresql://app:{PASSWORD}@db/shop", x: 1}}}}',
        f'sources: {{shop: {{url: "{PASSWORD}" %',
        f'sources: "postgresql://app:{PASSWORD}@db/shop',
        f'sources: {{shop: {{type: postgres, url: "postgresq//app:{PASSWORD}@db/shop"}}}}',
        f"pipeline: {{sinks: {{a: {{type: destination, class: 'a:B', options: {PASSWORD}}}}}}}",
    ],
)
def test_an_error_never_shows_a_secret(config: Load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(text)
    shown = "".join(traceback.format_exception(caught.value))
    # A traceback shows this file's own lines, so the check is of the messages alone.
    messages = [line for line in shown.splitlines() if not line.startswith("  ")]
    assert PASSWORD not in "\n".join(messages)
    assert PASSWORD not in caught.value.explain()


def test_a_secret_is_read_only_on_purpose() -> None:
    secret = Secret(PASSWORD)
    assert (str(secret), repr(secret), f"{secret}") == ("***", "Secret('***')", "***")
    assert secret.reveal() == PASSWORD
    assert secret == Secret(PASSWORD) != Secret("other")
    assert len({secret, Secret(PASSWORD)}) == 1
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)


def test_a_secret_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(Secret(PASSWORD))) == Secret(PASSWORD)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:pw@db:5/shop?a=b", "postgresql://app:***@db:5/shop?a=b"),
        ("postgresql://app@db/shop", "postgresql://app@db/shop"),
        ("postgresql:///shop", "postgresql:///shop"),
        ("postgresql://app:p@w/?#@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://db/?password=pw&user=app", "postgresql://db/?password=***&user=app"),
        ("postgresql://db/?sslpassword=pw", "postgresql://db/?sslpassword=***"),
        ("host=db password=pw user=app", "host=db password=*** user=app"),
        (r"host=db password = 'p \' w' user=app", "host=db password = *** user=app"),
        ("postgresql//app:pw@db", "***"),
        ("pw", "***"),
    ],
)
def test_a_url_shows_everything_but_its_passwords(url: str, shown: str) -> None:
    assert Secret(url).masked_url() == shown


# --- what the docs say ---------------------------------------------------------------------------


def documented(section: str) -> dict[str, str]:
    """Settings and their defaults, from the first table under a heading of docs/config.md."""
    page = (ROOT / "docs" / "config.md").read_text()
    _, _, rest = page.partition(f"\n## {section}\n")
    lines = rest.partition("\n## ")[0].splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    return {row[0].strip("|` "): row[1].strip("` ") for row in reversed(rows)}


def defaults(section: type, *without: str) -> dict[str, str]:
    """Settings and their defaults, from the code, as a YAML file would give them."""
    return {
        name: "required" if setting.required else written(setting.default)
        for name, setting in settings_of(section).items()
        if name not in without
    }


def written(value: object) -> str:
    """A default as the docs write it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Path):
        return str(value)
    return msgspec.json.encode(value, enc_hook=str).decode().strip('"') or '""'


def test_the_docs_name_every_setting_with_its_default() -> None:
    sections = ("sources", "server", "cdc", "model", "pipeline", "telemetry")
    assert documented("The file") == defaults(Config, *sections)
    assert documented("server") == defaults(ServerSection, "websocket", "tls")
    assert documented("server: tls") == defaults(TlsSection)
    assert documented("server: websocket") == defaults(WebSocketSection)
    assert documented("cdc") == defaults(CdcSection)
    assert documented("model") == defaults(Model, "entities")
    assert documented("model: entities") == defaults(EntityType, "name")
    assert documented("pipeline") == defaults(PipelineSection, "sinks")
    assert documented("telemetry") == defaults(TelemetrySection)


@pytest.mark.parametrize("name", source_types())
def test_the_docs_name_every_setting_of_a_source(name: str) -> None:
    section = documented(f"sources: {name}")
    assert section.pop("type") == "required"
    assert section == defaults(source_class(name), "name")


@pytest.mark.parametrize("name", sink_types())
def test_the_docs_name_every_setting_of_a_sink(name: str) -> None:
    section = documented(f"sinks: {name}")
    assert section.pop("type") == "required"
    assert section == defaults(sink_class(name), "name")


def test_a_pipeline_of_a_server_elsewhere_needs_no_source_and_hides_its_storage_keys() -> None:
    content = {
        "pipeline": {
            "url": "https://headrace.example",
            "api_key_env": "HEADRACE_KEY",
            "sinks": {
                "lake": {
                    "type": "tables",
                    "path": "s3://b",
                    "storage": {"KEY": "${HIDDEN}"},
                    "catalog": {
                        "type": "unity",
                        "url": "https://unity.example",
                        "catalog": "main",
                        "token": "${HIDDEN}",
                    },
                }
            },
        }
    }
    config = parse(content, folder=Path("/srv"), environment={"HIDDEN": "s3cret"})
    assert config.log_address == {
        "url": "https://headrace.example",
        "apiKeyEnv": "HEADRACE_KEY",
    }
    assert "s3cret" not in repr(config)


def test_a_setting_may_have_a_name_that_python_keeps_for_itself() -> None:
    sink = {"type": "destination", "class": "rows:Rows", "options": {"password": "${HIDDEN}"}}
    content = {"pipeline": {"url": "https://headrace.example", "sinks": {"mine": sink}}}
    config = parse(content, folder=Path("/srv"), environment={"HIDDEN": "s3cret"})
    assert config.pipeline is not None
    [mine] = config.pipeline.sinks
    assert isinstance(mine, DestinationSink)
    assert (mine.class_, mine.options) == ("rows:Rows", {"password": "s3cret"})
    assert "s3cret" not in repr(config)
    with pytest.raises(ConfigError, match="no setting called class_; did you mean class"):
        parse(
            {"pipeline": {"url": "https://x", "sinks": {"mine": {**sink, "class_": "a:B"}}}},
            folder=Path("/srv"),
            environment={"HIDDEN": "-"},
        )
