"""Table features: which of them Headrace writes, and which stop it from writing a table.

A feature that is only listed, such as CHECK constraints without a constraint, changes nothing.
"""

from collections.abc import Iterator

import msgspec

from ...errors import ConfigError, TableFailed
from .deltalog import Metadata, ProtocolVersions

VECTORS = "deletionVectors"
TIMES = "timestampNtz"
# What readers must know as well.
_READ = {VECTORS, TIMES, "vacuumProtocolCheck", "columnMapping", "variantType"}
# What a protocol before features stands for, by the writer's version that brings it.
_IMPLIED = {
    "appendOnly": 2,
    "invariants": 2,
    "checkConstraints": 3,
    "changeDataFeed": 4,
    "generatedColumns": 4,
    "columnMapping": 5,
    "identityColumns": 6,
}
_LISTED = (
    {VECTORS, TIMES, "vacuumProtocolCheck"}
    | _IMPLIED.keys()
    | {
        "allowColumnDefaults",
        "inCommitTimestamp",
        "variantType",  # delta-rs lists it when it sets a property
    }
)
_PROPERTIES = {
    "delta.appendOnly": "append-only tables",
    "delta.enableChangeDataFeed": "the change data feed",
    "delta.enableInCommitTimestamps": "in-commit timestamps",
    "delta.enableRowTracking": "row tracking",
}
_OF_COLUMNS = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "CURRENT_DEFAULT": "a column default",
}
_NEEDED_VERSIONS = (3, 7)


def features(protocol: ProtocolVersions) -> frozenset[str]:
    """The features that a table lists, or that its old protocol stands for."""
    if protocol.writer_features is None:
        return frozenset(e for e, v in _IMPLIED.items() if v <= protocol.min_writer_version)
    return frozenset([*protocol.writer_features, *(protocol.reader_features or ())])


def with_feature(protocol: ProtocolVersions, name: str) -> ProtocolVersions:
    """A protocol that lists a feature of readers and writers too."""
    listed = features(protocol) | {name}
    return ProtocolVersions(*_NEEDED_VERSIONS, sorted(listed & _READ), sorted(listed))


def expect_writable(uri: str, protocol: ProtocolVersions, metadata: Metadata) -> None:
    """Raise TableFailed if a writer would have to do what Headrace does not."""
    found = sorted(features(protocol) - _LISTED)
    found += list(_active(metadata))
    if protocol.min_reader_version > _NEEDED_VERSIONS[0]:
        found.append(f"reader version {protocol.min_reader_version}")
    if protocol.min_writer_version > _NEEDED_VERSIONS[1]:
        found.append(f"writer version {protocol.min_writer_version}")
    if found:
        raise TableFailed(
            f"the Delta table {uri} has what Headrace does not write: {', '.join(found)}",
            hint="Take it away with the tool that set it (ALTER TABLE … DROP CONSTRAINT, UNSET "
            "TBLPROPERTIES or DROP FEATURE), then run `headrace snapshot SOURCE TABLE`; or set "
            "another path.",
        )


def expect_readable(uri: str, protocol: ProtocolVersions, metadata: Metadata) -> None:
    """Raise ConfigError if rows would be read wrongly by whoever knows only files and vectors."""
    listed = set(protocol.reader_features or ())
    found = sorted(listed - _READ)
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        found.append("column mapping")
    if '"variant"' in metadata.schema_string:
        found.append("a variant column")
    if protocol.min_reader_version > _NEEDED_VERSIONS[0]:
        found.append(f"reader version {protocol.min_reader_version}")
    if found:
        raise ConfigError(
            f"the Delta table {uri} has what Headrace does not read: {', '.join(found)}",
            hint="Read it with the tool that has written it.",
        )


def _active(metadata: Metadata) -> Iterator[str]:
    noted = metadata.configuration
    for name in noted:
        if name.startswith("delta.constraints."):
            yield f"the CHECK constraint {name.removeprefix('delta.constraints.')}"
    for name, what in _PROPERTIES.items():
        if noted.get(name, "").lower() == "true":
            yield what
    if '"variant"' in metadata.schema_string:
        yield "a variant column"
    if noted.get("delta.columnMapping.mode", "none") != "none":
        yield "column mapping"
    for column in msgspec.json.decode(metadata.schema_string)["fields"]:
        for name, what in _OF_COLUMNS.items():
            if name in column["metadata"]:
                yield f"{what} ({column['name']})"
