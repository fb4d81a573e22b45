"""What `headrace postgres install` puts into a database: statements, and nothing but statements.

The rows are kept as `record_out` prints them, with the settings that every session of ours pins:
the same functions print the same values for logical replication, so both ways give one image.
"""

from __future__ import annotations

import hashlib

from psycopg import sql

from ..postgres.values import SESSION_SETTINGS

# A value's text is made inside the writer's session, whatever it has set for itself.
_PINNED = "".join(
    f"\nSET {name} = {sql.Literal(value).as_string()}"
    for name, value in SESSION_SETTINGS.items()
    if name != "client_encoding"  # not for functions, and no part of how values are printed
)

_SETUP = """
-- Where it exists, nobody needs the right to create one.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '@guc@') THEN
        CREATE SCHEMA @schema@;
    END IF;
END $$;

-- One row a change, written by whoever changes a captured table, in the same transaction.
CREATE TABLE IF NOT EXISTS @schema@.events (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id bigint GENERATED ALWAYS AS IDENTITY,
    event_type text NOT NULL,    -- entity:created, entity:updated, entity:deleted, entity:truncated
    entity_type text NOT NULL,   -- schema.table
    entity_id text,              -- the key's values
    operation json,              -- the row as JSON; of a deletion the old one
    op "char" NOT NULL,          -- I, U, D or T
    relation oid NOT NULL,
    columns text NOT NULL,       -- which row of `relations` describes old and new
    key json,
    old text,                    -- the rows as PostgreSQL prints them
    new text,
    annotations text,            -- what the transaction says of itself: headrace.metadata
    lsn pg_lsn NOT NULL DEFAULT pg_current_wal_insert_lsn(),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (xid, id)
);

-- The columns that tables had when rows were written. No key: two writers may tell the same.
CREATE TABLE IF NOT EXISTS @schema@.relations (
    columns text NOT NULL,
    described json NOT NULL
);
CREATE INDEX IF NOT EXISTS relations_columns ON @schema@.relations (columns);

-- Which installation this is, and up to which transaction events were removed.
CREATE TABLE IF NOT EXISTS @schema@.state (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    installation uuid NOT NULL DEFAULT gen_random_uuid(),
    trimmed xid8 NOT NULL DEFAULT '0'
);
INSERT INTO @schema@.state DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Not in SQL: the server would plan it anew for each statement of a writer.
CREATE OR REPLACE FUNCTION @schema@.columns_now(relation oid) RETURNS json
LANGUAGE plpgsql STABLE SET search_path = pg_catalog AS $$
BEGIN
    RETURN (SELECT json_build_object(
        'relation', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
        'columns', (
            SELECT coalesce(json_agg(json_build_object(
                'name', a.attname, 'type_id', a.atttypid::bigint, 'modifier', a.atttypmod,
                'key', coalesce(a.attnum = ANY (i.indkey), false)) ORDER BY a.attnum), '[]')
            FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND (a.attgenerated = '' OR a.attgenerated = 's'
                   AND current_setting('server_version_num')::int >= 180000)),
        'fields', (
            SELECT coalesce(json_agg(a.attname ORDER BY a.attnum), '[]')
            FROM pg_attribute a
            WHERE a.attrelid = columns_now.relation AND a.attnum > 0 AND NOT a.attisdropped),
        'references', (
            SELECT coalesce(json_agg(k.oid::bigint ORDER BY k.oid), '[]')
            FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'f'))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_index i ON i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
               WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
    -- Rows of a partition are those of the whole table.
    WHERE c.oid = coalesce(pg_partition_root(columns_now.relation)::oid, columns_now.relation));
END $$;

-- Makes sure that a table's columns are told, and gives what its rows need to know of them: which
-- description is theirs, schema.table, and the names of its key columns.
CREATE OR REPLACE FUNCTION @schema@.told(relation oid) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    now_is json := @schema@.columns_now(relation);
    hash text := md5(now_is::text);
BEGIN
    IF NOT EXISTS (SELECT FROM @schema@.relations r WHERE r.columns = hash) THEN
        INSERT INTO @schema@.relations VALUES (hash, now_is);
    END IF;
    RETURN ARRAY[hash, format('%s.%s', now_is ->> 'schema', now_is ->> 'name')] || ARRAY(
        SELECT c ->> 'name' FROM json_array_elements(now_is -> 'columns') c
        WHERE (c ->> 'key')::boolean);
END $$;

-- Before each statement: no table can be altered while one is under way.
CREATE OR REPLACE FUNCTION @schema@.note_columns() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    PERFORM set_config('@guc@.told_' || tg_relid, @schema@.told(tg_relid)::text, true);
    RETURN NULL;
END $$;

-- As its owner: whoever writes to a captured table need not know of this schema.
CREATE OR REPLACE FUNCTION @schema@.emit_cdc_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog@pinned@ AS $$
DECLARE
    -- A row that arrives by way of the whole table, of which this is a partition, has no note.
    told text[] := coalesce(nullif(current_setting('@guc@.told_' || tg_relid, true), '')::text[],
                            @schema@.told(tg_relid));
    key_columns text[] := told[3:];
    identity text;
    key json;
    written json;
    was text;
    is_now text;
    event text := 'entity:truncated';
BEGIN
    IF tg_op = 'INSERT' THEN
        event := 'entity:created';
        is_now := new::text;
        written := row_to_json(new);
    ELSIF tg_op = 'UPDATE' THEN
        event := 'entity:updated';
        was := old::text;
        is_now := new::text;
        written := row_to_json(new);
    ELSIF tg_op = 'DELETE' THEN
        event := 'entity:deleted';
        was := old::text;
        written := row_to_json(old);
    END IF;
    IF written IS NOT NULL AND key_columns[2] IS NOT NULL THEN
        SELECT string_agg(written ->> name, ','), json_object_agg(name, written -> name)
        INTO identity, key FROM unnest(key_columns) name;
    ELSIF written IS NOT NULL AND key_columns[1] IS NOT NULL THEN
        identity := written ->> key_columns[1];
        key := json_build_object(key_columns[1], written -> key_columns[1]);
    END IF;
    INSERT INTO @schema@.events (event_type, entity_type, entity_id, operation, op, relation,
                                 columns, key, old, new, annotations)
    VALUES (event, told[2], identity, written, left(tg_op, 1)::"char", tg_relid,
            told[1], key, was, is_now, nullif(current_setting('headrace.metadata', true), ''));
    RETURN NULL;
END $$;
"""

_REMOVE = """
DROP FUNCTION IF EXISTS @schema@.emit_cdc_event();
DROP FUNCTION IF EXISTS @schema@.note_columns();
DROP FUNCTION IF EXISTS @schema@.told(oid);
DROP FUNCTION IF EXISTS @schema@.columns_now(oid);
DROP TABLE IF EXISTS @schema@.events, @schema@.relations, @schema@.state;
-- It may be somebody else's, or hold something else.
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = '@guc@'
               AND pg_has_role(n.nspowner, 'USAGE')
               AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid)
               AND NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = n.oid)) THEN
        DROP SCHEMA @schema@;
    END IF;
END $$;
"""

_TRIGGERS = {
    "rows": "AFTER INSERT OR UPDATE OR DELETE ON @table@ FOR EACH ROW\n"
    "    EXECUTE FUNCTION @schema@.emit_cdc_event()",
    "truncate": "AFTER TRUNCATE ON @table@ FOR EACH STATEMENT\n"
    "    EXECUTE FUNCTION @schema@.emit_cdc_event()",
    "columns": "BEFORE INSERT OR UPDATE OR DELETE ON @table@ FOR EACH STATEMENT\n"
    "    EXECUTE FUNCTION @schema@.note_columns()",
}


def trigger_names(schema: str) -> tuple[str, ...]:
    """The triggers that a captured table has."""
    return tuple(f"{schema}_{part}" for part in _TRIGGERS)


def setup(schema: str) -> str:
    """The statements that create the event table and its functions, or bring them up to date."""
    text = _filled(_SETUP, schema).strip()
    function = f"{_quoted(schema)}.emit_cdc_event()"
    return f"{text}\n\nCOMMENT ON FUNCTION {function} IS '{edition(schema)}';"


def edition(schema: str) -> str:
    """What an installation of exactly these statements says of itself."""
    return f"headrace {hashlib.sha256(_filled(_SETUP, schema).encode()).hexdigest()[:16]}"


def remove(schema: str) -> str:
    """The statements that undo `setup`."""
    return _filled(_REMOVE, schema).strip()


def triggers(schema: str, table: tuple[str, str]) -> str:
    """The statements that make a table tell its changes.

    ALWAYS: also for rows that replication or a restore writes here.
    """
    statements = []
    for part, what in _TRIGGERS.items():
        name = _quoted(f"{schema}_{part}")
        statements.append(f"CREATE OR REPLACE TRIGGER {name}\n    {what};")
        statements.append(f"ALTER TABLE @table@ ENABLE ALWAYS TRIGGER {name};")
    return _filled("\n".join(statements), schema).replace("@table@", quoted_table(table))


def without_triggers(schema: str, table: tuple[str, str]) -> str:
    """The statements that undo `triggers`."""
    return "\n".join(
        f"DROP TRIGGER IF EXISTS {_quoted(name)} ON {quoted_table(table)};"
        for name in trigger_names(schema)
    )


def quoted_table(table: tuple[str, str]) -> str:
    """A table's name as SQL writes it."""
    return sql.Identifier(*table).as_string()


def _filled(text: str, schema: str) -> str:
    pinned = text.replace("@pinned@", _PINNED)
    return pinned.replace("@schema@", _quoted(schema)).replace("@guc@", schema)


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
