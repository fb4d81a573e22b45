import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    INSERT: _ClassVar[Operation]
    UPDATE: _ClassVar[Operation]
    DELETE: _ClassVar[Operation]
    DDL: _ClassVar[Operation]
    BEGIN: _ClassVar[Operation]
    COMMIT: _ClassVar[Operation]
OPERATION_UNSPECIFIED: Operation
INSERT: Operation
UPDATE: Operation
DELETE: Operation
DDL: Operation
BEGIN: Operation
COMMIT: Operation

class SubscribeRequest(_message.Message):
    __slots__ = ("after", "tables", "operations", "limit", "key_prefix", "event_type", "entity_type", "tenant_id", "trigger", "changed_fields", "together", "source", "epoch", "generation")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    ENTITY_TYPE_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    after: int
    tables: _containers.RepeatedScalarFieldContainer[str]
    operations: _containers.RepeatedScalarFieldContainer[Operation]
    limit: int
    key_prefix: str
    event_type: str
    entity_type: str
    tenant_id: str
    trigger: str
    changed_fields: _containers.RepeatedScalarFieldContainer[str]
    together: bool
    source: str
    epoch: str
    generation: str
    def __init__(self, after: _Optional[int] = ..., tables: _Optional[_Iterable[str]] = ..., operations: _Optional[_Iterable[_Union[Operation, str]]] = ..., limit: _Optional[int] = ..., key_prefix: _Optional[str] = ..., event_type: _Optional[str] = ..., entity_type: _Optional[str] = ..., tenant_id: _Optional[str] = ..., trigger: _Optional[str] = ..., changed_fields: _Optional[_Iterable[str]] = ..., together: _Optional[bool] = ..., source: _Optional[str] = ..., epoch: _Optional[str] = ..., generation: _Optional[str] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("event", "scanned", "gap", "events")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    event: CDCEvent
    scanned: int
    gap: Gap
    events: _containers.RepeatedCompositeFieldContainer[CDCEvent]
    def __init__(self, event: _Optional[_Union[CDCEvent, _Mapping]] = ..., scanned: _Optional[int] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., events: _Optional[_Iterable[_Union[CDCEvent, _Mapping]]] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("after", "tables", "operations", "limit", "key_prefix", "event_type", "entity_type", "tenant_id", "trigger", "changed_fields", "wait_ms", "source", "epoch", "generation")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    ENTITY_TYPE_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    after: int
    tables: _containers.RepeatedScalarFieldContainer[str]
    operations: _containers.RepeatedScalarFieldContainer[Operation]
    limit: int
    key_prefix: str
    event_type: str
    entity_type: str
    tenant_id: str
    trigger: str
    changed_fields: _containers.RepeatedScalarFieldContainer[str]
    wait_ms: int
    source: str
    epoch: str
    generation: str
    def __init__(self, after: _Optional[int] = ..., tables: _Optional[_Iterable[str]] = ..., operations: _Optional[_Iterable[_Union[Operation, str]]] = ..., limit: _Optional[int] = ..., key_prefix: _Optional[str] = ..., event_type: _Optional[str] = ..., entity_type: _Optional[str] = ..., tenant_id: _Optional[str] = ..., trigger: _Optional[str] = ..., changed_fields: _Optional[_Iterable[str]] = ..., wait_ms: _Optional[int] = ..., source: _Optional[str] = ..., epoch: _Optional[str] = ..., generation: _Optional[str] = ...) -> None: ...

class PollResponse(_message.Message):
    __slots__ = ("events", "scanned", "latest_sequence", "epoch", "gap", "generation")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    LATEST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[CDCEvent]
    scanned: int
    latest_sequence: int
    epoch: str
    gap: Gap
    generation: str
    def __init__(self, events: _Optional[_Iterable[_Union[CDCEvent, _Mapping]]] = ..., scanned: _Optional[int] = ..., latest_sequence: _Optional[int] = ..., epoch: _Optional[str] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., generation: _Optional[str] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("first", "last", "reason")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    reason: str
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class CDCEvent(_message.Message):
    __slots__ = ("id", "source", "schema", "table", "operation", "timestamp", "transaction_id", "position", "before", "after", "metadata", "before_json", "after_json", "ddl_type", "ddl_command", "sequence")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BEFORE_JSON_FIELD_NUMBER: _ClassVar[int]
    AFTER_JSON_FIELD_NUMBER: _ClassVar[int]
    DDL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DDL_COMMAND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    source: str
    schema: str
    table: str
    operation: Operation
    timestamp: _timestamp_pb2.Timestamp
    transaction_id: str
    position: Position
    before: _struct_pb2.Struct
    after: _struct_pb2.Struct
    metadata: _containers.ScalarMap[str, str]
    before_json: bytes
    after_json: bytes
    ddl_type: str
    ddl_command: str
    sequence: int
    def __init__(self, id: _Optional[str] = ..., source: _Optional[str] = ..., schema: _Optional[str] = ..., table: _Optional[str] = ..., operation: _Optional[_Union[Operation, str]] = ..., timestamp: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., transaction_id: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., before: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., after: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., before_json: _Optional[bytes] = ..., after_json: _Optional[bytes] = ..., ddl_type: _Optional[str] = ..., ddl_command: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("postgres", "mysql", "mongodb", "sqlite")
    POSTGRES_FIELD_NUMBER: _ClassVar[int]
    MYSQL_FIELD_NUMBER: _ClassVar[int]
    MONGODB_FIELD_NUMBER: _ClassVar[int]
    SQLITE_FIELD_NUMBER: _ClassVar[int]
    postgres: PostgresPosition
    mysql: MysqlPosition
    mongodb: MongodbPosition
    sqlite: SqlitePosition
    def __init__(self, postgres: _Optional[_Union[PostgresPosition, _Mapping]] = ..., mysql: _Optional[_Union[MysqlPosition, _Mapping]] = ..., mongodb: _Optional[_Union[MongodbPosition, _Mapping]] = ..., sqlite: _Optional[_Union[SqlitePosition, _Mapping]] = ...) -> None: ...

class PostgresPosition(_message.Message):
    __slots__ = ("lsn", "sequence")
    LSN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    lsn: str
    sequence: int
    def __init__(self, lsn: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class MysqlPosition(_message.Message):
    __slots__ = ("file", "position", "gtid")
    FILE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    GTID_FIELD_NUMBER: _ClassVar[int]
    file: str
    position: int
    gtid: str
    def __init__(self, file: _Optional[str] = ..., position: _Optional[int] = ..., gtid: _Optional[str] = ...) -> None: ...

class MongodbPosition(_message.Message):
    __slots__ = ("resume_token", "cluster_time")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_TIME_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    cluster_time: ClusterTime
    def __init__(self, resume_token: _Optional[str] = ..., cluster_time: _Optional[_Union[ClusterTime, _Mapping]] = ...) -> None: ...

class SqlitePosition(_message.Message):
    __slots__ = ("transaction", "entry")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    transaction: int
    entry: int
    def __init__(self, transaction: _Optional[int] = ..., entry: _Optional[int] = ...) -> None: ...

class ClusterTime(_message.Message):
    __slots__ = ("t", "i")
    T_FIELD_NUMBER: _ClassVar[int]
    I_FIELD_NUMBER: _ClassVar[int]
    t: int
    i: int
    def __init__(self, t: _Optional[int] = ..., i: _Optional[int] = ...) -> None: ...
