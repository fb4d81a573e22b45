"""The settings: a class a section of the config file, whose fields are what one may set."""

import re
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ..errors import ConfigError, nearest
from ..model import Model, Selection
from ..secret import Secret
from ..sinks import Sink
from ..sources import Source
from . import storage

# As a browser writes it; a star stands for every host below a name of at least two parts.
_ORIGIN = re.compile(
    r"https?://(\*\.[a-z0-9-]+(\.[a-z0-9-]+)+|[a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.I
)

Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class WebSocketSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `server.websocket`: how long a client may take, and what is held for it."""

    auth_seconds: Seconds = 10.0  # for the client's first message
    # Clients and proxies take a longer silence for a lost connection.
    ping_seconds: Annotated[float, Meta(gt=0, le=60)] = 30.0
    pong_seconds: Seconds = 60.0  # until a ping is answered
    status_seconds: Seconds = 30.0  # between two messages of type connection_status
    degraded_events: Annotated[int, Meta(ge=1)] = 1000  # that wait for a client
    critical_events: Annotated[int, Meta(ge=1)] = 10_000
    held_seconds: Seconds = 300.0  # how old an event may be that a returning client gets
    held_events: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000  # how many of them

    def __post_init__(self) -> None:
        if self.degraded_events > self.critical_events:
            raise ValueError(
                f"degraded_events {self.degraded_events} is above critical_events "
                f"{self.critical_events}; set it to at most that"
            )


class TlsSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `server.tls`: files in PEM, read again when they change."""

    certificate: Path  # with the chain of those that signed it
    key: Path | None = None  # None: in the same file
    client_ca: Path | None = None  # who signs the certificates of clients; None: they need none


class ServerSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `server`: where and how the log is served."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 3000
    grpc_port: Annotated[int, Meta(ge=1, le=65535)] | None = None  # None: no gRPC
    max_lag_seconds: Positive = 60.0  # a source further behind is unhealthy
    stall_seconds: Positive = 90.0  # a source silent for longer is unhealthy
    max_sink_lag_seconds: Positive = 300.0  # a sink further behind makes it degraded
    allow_remote: bool = False  # no key is needed: something else decides who reaches the server
    require_key: bool = False  # also from programs on this machine
    # At once, of HTTP and of gRPC each; None: what the limit of open files allows.
    max_connections: Annotated[int, Meta(ge=1)] | None = None
    tls: TlsSection | None = None  # None: nothing is encrypted
    # Pages that a browser may let use the server, besides those from its own address.
    allowed_origins: tuple[str, ...] = ()
    websocket: WebSocketSection = WebSocketSection()

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is no origin; write https://shop.example.com, "
                    "with a port if it has one and nothing behind it, or https://*.example.com"
                )

    @property
    def url(self) -> str:
        """The address at which a program on this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.tls is None else "https"
        return (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )


class CdcSection(Selection, frozen=True, kw_only=True):
    """The section `cdc`: whether changes are captured, how long kept, and which become events."""

    enabled: bool = True
    storage: str = storage.DEFAULT
    retention_days: Positive = 30.0
    retention_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_log_gb: Positive | None = None  # beyond it the oldest changes go whoever needs them
    max_cursor_hours: Positive = 168.0  # how old a change may be that a read key's cursor keeps
    batch_size: Annotated[int, Meta(ge=1, le=10_000)] = 100

    def __post_init__(self) -> None:
        storage.check(self.storage)


_CLUSTERS = ("spark://", "yarn", "k8s://", "local-cluster[")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a Path has one slash of two
_STORAGE = re.compile(r"hdfs://|[A-Za-z][A-Za-z0-9+.-]+://[^/]")


def _expect_local(setting: str, folder: Path) -> None:
    """ValueError when a folder that this machine must have is the address of a storage."""
    if found := _ADDRESS.match(str(folder)):
        slashes = "///" if found[1].lower() == "file" else "//"
        address = f"{found[1]}:{slashes}{str(folder)[found.end() :]}"
        raise ValueError(
            f"{setting}: {address} is an address, and what is kept there needs a file system with "
            "locks and renames; set a folder on a disk of this machine (in a container: a volume)"
        )


def _expect_storage(setting: str, address: str) -> None:
    """ValueError when an address cannot be one of Hadoop's file systems."""
    found = urlsplit(address)
    if ":" in found.netloc.rpartition("@")[0]:
        raise ValueError(
            f"{setting}: the address has a password in it, which files and logs would show; set "
            "it in spark, such as spark.hadoop.fs.s3a.secret.key"
        )
    if found.scheme == "file":
        raise ValueError(f"{setting}: {address} is a folder of this machine; write it as a path")
    if not _STORAGE.match(address):
        raise ValueError(f"{setting}: {address} is no address; write it as s3a://bucket/folder")


class PipelineSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `pipeline`: what Spark carries from the log to where."""

    master: str = "local[*]"
    spark: dict[str, Secret] = {}  # any setting of Spark; some of them are keys to a storage
    checkpoint_dir: str | None = None  # a folder, or an address that Spark reaches
    trigger_seconds: Positive = 1.0
    max_changes_per_batch: Annotated[int, Meta(ge=1)] | None = None  # as each sink likes best
    url: str | None = None
    api_key_env: str | None = None
    api_key_file: Path | None = None
    shared_disk: bool = False  # driver and executors have the same folders at the same paths
    sinks: tuple[Sink, ...] = ()

    def __post_init__(self) -> None:
        if "spark.master" in self.spark:
            raise ValueError("spark: spark.master is set as master")
        if self.checkpoint_address:
            _expect_storage("checkpoint_dir", self.checkpoint_address)
        if self.shared_disk or not self.master.startswith(_CLUSTERS):
            return
        for sink in self.sinks:
            for setting, folder in sink.local_folders.items():
                raise ValueError(
                    f"sinks.{sink.name}.{setting}: {folder} is another folder on every machine of "
                    f"{self.master}, and the driver would look for files that executors wrote to "
                    "their own disks; write it as s3://bucket/folder, or set shared_disk: true "
                    "where all of them have the same disk there"
                )

    @property
    def checkpoint_address(self) -> str:
        """Where Spark's own files of checkpoints are, in a storage; "": in `checkpoint_dir`."""
        given = self.checkpoint_dir or ""
        return given.rstrip("/") if _ADDRESS.match(given) else ""

    @property
    def local(self) -> bool:
        """Whether all of Spark runs inside this machine's one process."""
        return self.master == "local" or self.master.startswith("local[")


class RemoteServer(msgspec.Struct, frozen=True):
    """A server elsewhere, and the API key for it."""

    url: str
    key: Secret | None = None


class TelemetrySection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `telemetry`: where traces go, and of how many transactions."""

    endpoint: str  # of an OpenTelemetry collector, for OTLP over HTTP
    sample: Annotated[float, Meta(gt=0, le=1)] = 0.01

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint {self.endpoint!r} is no address; write it as http://127.0.0.1:4318"
            )


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a process of Headrace is configured with."""

    NOT_SETTINGS: ClassVar[tuple[str, ...]] = ("warnings", "remote")

    sources: tuple[Source, ...]
    data_dir: Path = Path("data")
    server: ServerSection = ServerSection()
    cdc: CdcSection = CdcSection()
    model: Model = Model()
    pipeline: PipelineSection | None = None
    telemetry: TelemetrySection | None = None  # None: nothing is traced
    warnings: tuple[str, ...] = ()  # settings that the file gives under their old names
    remote: RemoteServer | None = None  # a command talks to this one, and to no log on disk

    def __post_init__(self) -> None:
        _expect_local("data_dir", self.data_dir)

    @property
    def log_dir(self) -> Path:
        """Where the log lies."""
        return self.data_dir / "log"

    @property
    def pipeline_dir(self) -> Path:
        """Where a pipeline says how it is doing."""
        return self.data_dir / "pipeline"

    @property
    def checkpoint_dir(self) -> Path:
        """Where the sinks have what they keep on this machine, one folder a sink.

        Also how far the queries are, unless that is in a storage: see `checkpoint_address`.
        """
        if self.pipeline is None or not self.pipeline.checkpoint_dir or self.checkpoint_address:
            return self.pipeline_dir
        return Path(self.pipeline.checkpoint_dir)

    @property
    def checkpoint_address(self) -> str:
        """Where Spark's own files of checkpoints are, in a storage; "": in `checkpoint_dir`."""
        return self.pipeline.checkpoint_address if self.pipeline else ""

    def source_dir(self, name: str) -> Path:
        """Where requests to a source are."""
        return self.data_dir / "sources" / name

    def sink_dir(self, name: str) -> Path:
        """Where a sink has its checkpoint, its notes and the requests to it."""
        return self.checkpoint_dir / name

    @property
    def verify_dir(self) -> Path:
        """Where rows of sources are while they are compared."""
        return self.data_dir / "verify"

    @property
    def log_address(self) -> dict[str, str]:
        """How Spark reaches the log: `path`, or `url` where its tasks run on other machines."""
        pipeline = self.pipeline
        if pipeline is None or (pipeline.local and not pipeline.url):
            return {"path": str(self.log_dir)}
        address = {"url": pipeline.url or self.server.url}
        if not pipeline.url and self.server.tls:
            address["caFile"] = str(self.server.tls.certificate)
        if pipeline.api_key_env:
            address["apiKeyEnv"] = pipeline.api_key_env
        if pipeline.api_key_file:
            address["apiKeyFile"] = str(pipeline.api_key_file)
        return address

    def source(self, name: str) -> Source:
        """The source of that name."""
        for source in self.sources:
            if source.name == name:
                return source
        known = [source.name for source in self.sources]
        raise ConfigError(f"no source called {name}{nearest(name, known)}")
