"""What `headrace postgres install` puts into a database, but for the triggers: see `triggers`.

The rows are kept as `record_out` prints them, with the settings that every session of ours pins:
the same functions print the same values for logical replication, so both ways give one image.

The functions run as whoever has installed them, for whoever may write to a table. So nothing of a
writer's is ever called: pg_temp is searched last (it is first where it is not named), catalogs are
named in full, what a writer could have set is sealed, and no cast of a foreign type is used.
"""

from __future__ import annotations

import hashlib

from psycopg import sql

from ..postgres.values import SESSION_SETTINGS
from . import row_json

# A value's text is made inside the writer's session, whatever it has set for itself.
_PINNED = "".join(
    f"\nSET {name} = {sql.Literal(value).as_string()}"
    for name, value in SESSION_SETTINGS.items()
    if name != "client_encoding"  # not for functions, and no part of how values are printed
)

_SETUP = """
-- Where it exists, nobody needs the right to create one.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = '@guc@') THEN
        CREATE SCHEMA @schema@;
    END IF;
END $$;

CREATE SEQUENCE IF NOT EXISTS @schema@.event_ids;

-- One row a change, written by whoever changes a captured table, in the same transaction.
CREATE TABLE IF NOT EXISTS @schema@.events (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id bigint NOT NULL DEFAULT nextval('@schema@.event_ids'),
    turn bigint NOT NULL,        -- orders the statements of a transaction: see emit_cdc_event()
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
    PRIMARY KEY (xid, turn, id)
);

-- The columns that tables had when rows were written. No key: two writers may tell the same.
CREATE TABLE IF NOT EXISTS @schema@.relations (
    columns text NOT NULL,
    described json NOT NULL
);
CREATE INDEX IF NOT EXISTS relations_columns ON @schema@.relations (columns);

-- What told() has found, by the catalogs' rows that it was found in: whoever changes one of these
-- writes another.
CREATE TABLE IF NOT EXISTS @schema@.described (
    relation oid NOT NULL,
    catalogs text NOT NULL,
    told text[] NOT NULL
);
CREATE INDEX IF NOT EXISTS described_relation ON @schema@.described (relation);

-- Which installation this is, of which server, and up to which transaction events were removed.
CREATE TABLE IF NOT EXISTS @schema@.state (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    installation uuid NOT NULL DEFAULT gen_random_uuid(),
    server text NOT NULL,
    trimmed xid8 NOT NULL DEFAULT '0'
);
INSERT INTO @schema@.state (server) SELECT @here@ ON CONFLICT DO NOTHING;

-- What only these functions know; nobody needs to read it.
CREATE TABLE IF NOT EXISTS @schema@.secret (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    word text NOT NULL DEFAULT gen_random_uuid()::text || gen_random_uuid()
);
INSERT INTO @schema@.secret DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Whoever removes events, and however: a reader that has not read them has to know.
CREATE OR REPLACE FUNCTION @schema@.note_removed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last xid8;
BEGIN
    IF tg_op = 'TRUNCATE' THEN
        SELECT e.xid INTO last FROM @schema@.events e ORDER BY e.xid DESC LIMIT 1;
    ELSE
        SELECT gone.xid INTO last FROM gone ORDER BY gone.xid DESC LIMIT 1;
    END IF;
    UPDATE @schema@.state SET trimmed = (last::text::bigint + 1)::text::xid8 WHERE trimmed <= last;
    RETURN NULL;
END $$;
-- Where they exist, no lock is taken for which writers would wait.
DO $$ BEGIN
    IF (SELECT count(*) FROM pg_catalog.pg_trigger t
        WHERE t.tgrelid = '@schema@.events'::regclass AND t.tgenabled = 'A'
          AND t.tgname IN ('note_deleted', 'note_truncated')) < 2 THEN
        CREATE OR REPLACE TRIGGER note_deleted AFTER DELETE ON @schema@.events
            REFERENCING OLD TABLE AS gone
            FOR EACH STATEMENT EXECUTE FUNCTION @schema@.note_removed();
        CREATE OR REPLACE TRIGGER note_truncated BEFORE TRUNCATE ON @schema@.events
            FOR EACH STATEMENT EXECUTE FUNCTION @schema@.note_removed();
        ALTER TABLE @schema@.events ENABLE ALWAYS TRIGGER note_deleted;
        ALTER TABLE @schema@.events ENABLE ALWAYS TRIGGER note_truncated;
    END IF;
END $$;

-- Not in SQL: the server would plan it anew for each statement of a writer.
CREATE OR REPLACE FUNCTION @schema@.columns_now(relation oid) RETURNS json
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT json_build_object(
        'of', columns_now.relation::bigint, 'relation', c.oid::bigint,
        'schema', n.nspname, 'name', c.relname,
        'columns', (
            SELECT coalesce(json_agg(json_build_object(
                'name', a.attname, 'type_id', a.atttypid::bigint, 'modifier', a.atttypmod,
                'key', coalesce(a.attnum = ANY (i.indkey), false)) ORDER BY a.attnum), '[]')
            FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND (a.attgenerated = '' OR a.attgenerated = 's'
                   AND current_setting('server_version_num')::int >= 180000)),
        'fields', (
            SELECT coalesce(json_agg(a.attname ORDER BY a.attnum), '[]')
            FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = columns_now.relation AND a.attnum > 0 AND NOT a.attisdropped),
        'references', (
            SELECT coalesce(json_agg(k.oid::bigint ORDER BY k.oid), '[]')
            FROM pg_catalog.pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'f'))
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
               WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
    -- Rows of a partition are those of the whole table.
    WHERE c.oid = coalesce(pg_partition_root(columns_now.relation)::oid, columns_now.relation));
END $$;

-- Makes sure that a table's columns are told, and gives what its rows need to know of them: which
-- description is theirs, schema.table, what of their JSON is made column by column ('all', 'key'
-- or 'none'), the table of which it is a partition or else itself, and its key columns.
CREATE OR REPLACE FUNCTION @schema@.told(relation oid) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    root oid := coalesce(pg_partition_root(relation)::oid, relation);
    written_in text := (
        SELECT concat(current_setting('server_version_num'), ' ', c.ctid, c.xmin, n.ctid, n.xmin,
            (SELECT string_agg(concat(a.ctid, a.xmin), '') FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = told.relation AND a.attnum > 0),
            (SELECT string_agg(concat(i.ctid, i.xmin), '') FROM pg_catalog.pg_index i
             WHERE i.indrelid = root),
            (SELECT string_agg(concat(k.ctid, k.xmin), '') FROM pg_catalog.pg_constraint k
             WHERE k.conrelid = root AND k.contype = 'f'))
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = root);
    known text[];
    now_is json;
    hash text;
BEGIN
    IF root <> relation THEN
        written_in := concat(written_in, ' ', (
            SELECT string_agg(concat(a.ctid, a.xmin), '') FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = root AND a.attnum > 0));
    END IF;
    SELECT d.told INTO known FROM @schema@.described d
    WHERE d.relation = told.relation AND d.catalogs = written_in LIMIT 1;
    IF known IS NULL THEN
        now_is := @schema@.columns_now(relation);
        hash := md5(now_is::text);
        IF NOT EXISTS (SELECT FROM @schema@.relations r WHERE r.columns = hash) THEN
            INSERT INTO @schema@.relations VALUES (hash, now_is);
        END IF;
        known := ARRAY[hash, format('%s.%s', now_is ->> 'schema', now_is ->> 'name'), 'none',
                       now_is ->> 'relation'] || ARRAY(
            SELECT c ->> 'name' FROM json_array_elements(now_is -> 'columns') c
            WHERE (c ->> 'key')::boolean);
        INSERT INTO @schema@.described VALUES (relation, written_in, known);
    END IF;
    -- Owners of types, casts and rights of roles are in other catalogs.
    known[3] := @by_columns@;
    RETURN known;
END $$;

@row_json@

-- Before each statement: no table can be altered while one is under way.
CREATE OR REPLACE FUNCTION @schema@.note_columns() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    told text[] := @schema@.told(tg_relid);
    noted text[] := @seal@ || told;
BEGIN
    PERFORM set_config('@guc@.told_' || tg_relid, noted::text, true),
            set_config('@guc@.turn_' || pg_trigger_depth(), tg_relid::text, true);
    RETURN NULL;
END $$;

-- Events of one statement have one `turn`, and those of what its AFTER triggers write have a later
-- one, though they are written before: (turn, id) is the order of the changes. So the first row of
-- a statement takes its turn, before any other trigger of a row fires. Three numbers: of a MERGE,
-- deletions come first, and insertions last, as its rows may take keys that others leave.
CREATE OR REPLACE FUNCTION @schema@.take_turn() RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    turn bigint := nextval('@schema@.event_ids');
BEGIN
    PERFORM nextval('@schema@.event_ids'), nextval('@schema@.event_ids');
    RETURN turn;
END $$;

-- After each statement, for all of its rows at once. As its owner: whoever writes to a captured
-- table need not know of this schema. One plan is made, and kept for any number of rows: so without
-- nested loops, whatever was expected when it was made.
CREATE OR REPLACE FUNCTION @schema@.emit_cdc_events() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_nestloop = off@pinned@ AS $$
DECLARE
    first text := '@guc@.first_' || tg_relid || '_';
    used text := '@guc@.used_' || tg_relid || '_' || pg_trigger_depth() - 1;
    depth int := pg_trigger_depth();
    rows int;
    turn bigint;
    told text[];
    key_columns text[];
    annotations text := nullif(current_setting('headrace.metadata', true), '');
BEGIN
    -- Nobody needs the exact number of many.
    IF tg_op = 'DELETE' THEN
        rows := (SELECT count(*) FROM (SELECT FROM old_rows LIMIT 1000) few);
    ELSE
        rows := (SELECT count(*) FROM (SELECT FROM new_rows LIMIT 1000) few);
    END IF;
    IF rows = 0 THEN
        RETURN NULL;
    END IF;
    told := @schema@.told(tg_relid);
    -- The triggers of the whole table have the rows of a partition. Of a table with children, the
    -- rows of the children are among these: it gets other triggers, and is read anew then.
    IF told[4] <> tg_relid::text OR tg_op <> 'INSERT' AND EXISTS (
            SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = tg_relid) THEN
        RETURN NULL;
    END IF;
    key_columns := told[5:];
    -- Of one statement, insertions and updates come here one after the other.
    turn := nullif(coalesce(nullif(current_setting(first || depth - 1, true), ''),
                            nullif(current_setting(used, true), '')), 'due')::bigint;
    turn := coalesce(turn, @schema@.take_turn());
    -- What a foreign key deletes or updates was due one deeper.
    PERFORM set_config(first || depth - 1, '', true), set_config(first || depth, '', true),
            set_config(used, turn::text, true);
    turn := turn + (CASE tg_op WHEN 'INSERT' THEN 2 WHEN 'UPDATE' THEN 1 ELSE 0 END);
    -- For few rows a plan costs more than to look whether their JSON can be parsed.
    IF told[3] = 'key' AND rows < 50 AND tg_op = 'DELETE' THEN
        told[3] := (SELECT CASE WHEN bool_and(@parsable@) THEN 'none' ELSE 'key' END FROM (
            SELECT row_to_json("!row".*) AS written FROM old_rows "!row" OFFSET 0) few);
    ELSIF told[3] = 'key' AND rows < 50 THEN
        told[3] := (SELECT CASE WHEN bool_and(@parsable@) THEN 'none' ELSE 'key' END FROM (
            SELECT row_to_json("!row".*) AS written FROM new_rows "!row" OFFSET 0) few);
    END IF;
    -- For many rows it pays to name the key's columns, instead of reading them from JSON.
    IF told[3] <> 'none' OR rows = 1000 THEN
        EXECUTE format(
            CASE tg_op WHEN 'INSERT' THEN $emit$@inserted_by_columns@$emit$
                       WHEN 'UPDATE' THEN $emit$@updated_by_columns@$emit$
                       ELSE $emit$@deleted_by_columns@$emit$ END,
            CASE told[3] WHEN 'all' THEN @schema@.json_of(tg_relid, '"!row"')
                         ELSE 'row_to_json("!row".*)' END,
            @schema@.json_of(tg_relid, '"!row"', key_columns),
            @schema@.text_of(tg_relid, '"!row"', key_columns))
        USING turn, told, key_columns, tg_op, tg_relid, annotations;
    ELSIF tg_op = 'INSERT' THEN
        @inserted@;
    ELSIF tg_op = 'UPDATE' THEN
        @updated@;
    ELSE
        @deleted@;
    END IF;
    RETURN NULL;
END $$;

-- For each row, where no statement has all of them: of partitions, of tables with parents or
-- children, and what logical replication applies, which fires no trigger of statements.
-- Elsewhere for the first row of a statement, which takes its turn.
CREATE OR REPLACE FUNCTION @schema@.emit_cdc_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp@pinned@ AS $$
DECLARE
    number bigint;
    turn bigint;
    first text;
    statement text := '@guc@.turn_' || pg_trigger_depth();
    under_way text[] := string_to_array(current_setting(statement, true), ' ');
    noted text[] := nullif(current_setting('@guc@.told_' || tg_relid, true), '')::text[];
    told text[] := noted[2:];
    key_columns text[];
    identity text;
    key json;
    written json;
    was text;
    is_now text;
    event text := 'entity:truncated';
BEGIN
    IF tg_argv[0] = 'first' AND current_setting('session_replication_role') <> 'replica' THEN
        first := '@guc@.first_' || tg_relid || '_' || pg_trigger_depth() - 1;
        IF coalesce(current_setting(first, true), '') IN ('', 'due') THEN
            PERFORM set_config(first, @schema@.take_turn()::text, true);
        END IF;
        RETURN NULL;
    END IF;
    -- A row that arrives by way of the whole table, of which this is a partition, has no note.
    IF noted IS NULL OR noted[1] IS DISTINCT FROM @seal@ THEN
        told := @schema@.told(tg_relid);
    END IF;
    -- A partition has triggers of the whole table, and may have kept those of its own.
    IF told[4] <> (CASE WHEN tg_name = '!@guc@_rows' THEN told[4]
                        WHEN tg_op = 'TRUNCATE' THEN tg_relid::text
                        ELSE right(tg_name, -length('!@guc@_rows_')) END) THEN  -- or _turn_
        RETURN NULL;
    END IF;
    key_columns := told[5:];
    number := nextval('@schema@.event_ids');
    turn := number;
    IF tg_op <> 'TRUNCATE' AND under_way[1] = tg_relid::text THEN
        IF under_way[2] IS NULL THEN
            PERFORM set_config(statement, tg_relid || ' ' || number, true);
        ELSE
            turn := least(under_way[2]::bigint, number);
        END IF;
    END IF;
    IF tg_op = 'DELETE' THEN
        event := 'entity:deleted';
        was := old::text;
        written := CASE WHEN told[3] <> 'all' THEN row_to_json(old) END;
    ELSIF tg_op <> 'TRUNCATE' THEN
        event := 'entity:created';
        is_now := new::text;
        written := CASE WHEN told[3] <> 'all' THEN row_to_json(new) END;
    END IF;
    IF tg_op = 'UPDATE' THEN
        event := 'entity:updated';
        was := old::text;
    END IF;
    IF tg_op = 'TRUNCATE' THEN
        NULL;
    ELSIF told[3] = 'all' OR told[3] = 'key' AND NOT @parsable@ THEN
        IF tg_op = 'DELETE' THEN
            new := old;
        END IF;
        SELECT * INTO written, key, identity
        FROM @schema@.row_parts(tg_relid, new, key_columns, told[3]);
    ELSIF key_columns[2] IS NOT NULL THEN
        SELECT string_agg(written ->> name, ','), json_object_agg(name, written -> name)
        INTO identity, key FROM unnest(key_columns) name;
    ELSIF key_columns[1] IS NOT NULL THEN
        identity := written ->> key_columns[1];
        key := json_build_object(key_columns[1], written -> key_columns[1]);
    END IF;
    INSERT INTO @schema@.events (id, turn, event_type, entity_type, entity_id, operation, op,
                                 relation, columns, key, old, new, annotations)
    VALUES (number, turn, event, told[2], identity, written, left(tg_op, 1)::"char",
            tg_relid, told[1], key, was, is_now,
            nullif(current_setting('headrace.metadata', true), ''));
    RETURN NULL;
END $$;
"""

# All rows of a statement as events, in their order: nothing sorts what a tuplestore gives. OFFSET
# keeps the planner from making a row's JSON anew wherever it is used.
_EMIT = """INSERT INTO @schema@.events (id, turn, event_type, entity_type, entity_id, operation, op,
                                     relation, columns, key, old, new, annotations)
        SELECT nextval('@schema@.event_ids'), @turn@, '@event@', (@told@)[2],
               @identity@,
               keyed.written, left(@tg_op@, 1)::"char", @tg_relid@, (@told@)[1], keyed.key,
               keyed.was, keyed.is_now, @annotations@
        FROM (@keyed@ OFFSET 0) keyed"""
_KEYED = """SELECT whole.*, CASE cardinality(@key_columns@) WHEN 0 THEN NULL
                  WHEN 1 THEN json_build_object((@key_columns@)[1],
                                                whole.written -> (@key_columns@)[1])
                  ELSE (SELECT json_object_agg(name, whole.written -> name)
                        FROM unnest(@key_columns@) name) END AS key
              FROM (@rows@ OFFSET 0) whole"""
_IDENTITY = """CASE cardinality(@key_columns@) WHEN 0 THEN NULL
                    WHEN 1 THEN keyed.key ->> (@key_columns@)[1]
                    ELSE (SELECT string_agg(keyed.key ->> name, ',')
                          FROM unnest(@key_columns@) name) END"""
_VARIABLES = ("turn", "told", "key_columns", "tg_op", "tg_relid", "annotations")

# Both tuplestores of an update have the same rows in the same order. With .* an alias is
# never taken for a column of the same name.
_PAIRED = """SELECT o.was, n.*
                    FROM (SELECT row_number() OVER () AS at, ("!row".*)::text AS was
                          FROM old_rows "!row") o
                    JOIN (SELECT row_number() OVER () AS at, ("!row".*)::text AS is_now, @written@
                          FROM new_rows "!row") n USING (at)
                    ORDER BY at"""
_EMITTED = {
    "inserted": (
        "entity:created",
        'SELECT NULL AS was, ("!row".*)::text AS is_now, @written@ FROM new_rows "!row"',
    ),
    "updated": ("entity:updated", _PAIRED),
    "deleted": (
        "entity:deleted",
        'SELECT ("!row".*)::text AS was, NULL AS is_now, @written@ FROM old_rows "!row"',
    ),
}


def _emitting() -> dict[str, str]:
    """The statements of emit_cdc_events(), and the same as text, by the columns of a row."""
    found: dict[str, str] = {}
    for name, (event, rows) in _EMITTED.items():
        text = _EMIT.replace("@event@", event)
        plain = text.replace("@identity@", _IDENTITY)
        plain = plain.replace("@keyed@", _KEYED).replace("@rows@", rows)
        plain = plain.replace("@written@", 'row_to_json("!row".*) AS written')
        named = text.replace("@identity@", "keyed.identity").replace("@keyed@", rows)
        named = named.replace("@written@", "%1$s AS written, %2$s AS key, %3$s AS identity")
        for number, variable in enumerate(_VARIABLES, 1):
            plain = plain.replace(f"@{variable}@", variable)
            named = named.replace(f"@{variable}@", f"${number}")
        found |= {name: plain, f"{name}_by_columns": named}
    return found


# Tells what we have noted in this transaction from what a writer has: settings are anybody's.
_SEAL = """(SELECT md5(s.word || tg_relid || ' ' || pg_backend_pid() || ' '
        || (date_part('epoch', now()) * 1000000)::bigint || told::text || s.word)
        FROM @schema@.secret s)"""

# Which database of which server; a dump that is loaded elsewhere says where it was made.
HERE = """(SELECT s.system_identifier || '/' || d.oid
    FROM pg_catalog.pg_control_system() s, pg_catalog.pg_database d
    WHERE d.datname = current_database())"""

_MOVED = """
TRUNCATE @schema@.events, @schema@.relations, @schema@.described;
UPDATE @schema@.state SET server = @here@, trimmed = '0', installation = gen_random_uuid();
"""

_REMOVE = """
DROP FUNCTION IF EXISTS @schema@.emit_cdc_event();
DROP FUNCTION IF EXISTS @schema@.emit_cdc_events();
DROP FUNCTION IF EXISTS @schema@.take_turn();
DROP FUNCTION IF EXISTS @schema@.note_columns();
-- These two are of earlier editions, whose functions may still be running when they are replaced.
DROP FUNCTION IF EXISTS @schema@.as_json(oid, record);
DROP FUNCTION IF EXISTS @schema@.json_columns(oid, text, text[]);
DROP FUNCTION IF EXISTS @schema@.row_parts(oid, record, text[], text);
DROP FUNCTION IF EXISTS @schema@.text_of(oid, text, text[]);
DROP FUNCTION IF EXISTS @schema@.json_of(oid, text, text[]);
DROP FUNCTION IF EXISTS @schema@.has_own_json(oid);
DROP FUNCTION IF EXISTS @schema@.told(oid);
DROP FUNCTION IF EXISTS @schema@.columns_now(oid);
DROP TABLE IF EXISTS @schema@.events, @schema@.relations, @schema@.described, @schema@.state,
    @schema@.secret;
DROP SEQUENCE IF EXISTS @schema@.event_ids;
DROP FUNCTION IF EXISTS @schema@.note_removed();
-- It may be somebody else's, or hold something else.
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = '@guc@'
               AND pg_has_role(n.nspowner, 'USAGE')
               AND NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = n.oid)
               AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = n.oid)) THEN
        DROP SCHEMA @schema@;
    END IF;
END $$;
"""


def setup(schema: str) -> str:
    """The statements that create the event table and its functions, or bring them up to date."""
    text = filled(_SETUP, schema).strip()
    function = f"{quoted(schema)}.emit_cdc_event()"
    return f"{text}\n\nCOMMENT ON FUNCTION {function} IS '{edition(schema)}';"


def edition(schema: str) -> str:
    """What an installation of exactly these statements says of itself."""
    return f"headrace {hashlib.sha256(filled(_SETUP, schema).encode()).hexdigest()[:16]}"


def moved(schema: str) -> str:
    """The statements that forget what a dump has brought from another server."""
    return filled(_MOVED, schema).strip()


def remove(schema: str) -> str:
    """The statements that undo `setup`."""
    return filled(_REMOVE, schema).strip()


def quoted_table(table: tuple[str, str]) -> str:
    """A table's name as SQL writes it."""
    return sql.Identifier(*table).as_string()


def filled(text: str, schema: str) -> str:
    """Statements for an event table of this schema."""
    parts = {"row_json": row_json.FUNCTIONS, "by_columns": row_json.BY_COLUMNS} | _emitting()
    parts |= {"pinned": _PINNED, "here": HERE, "seal": _SEAL, "own_json": row_json.OWN_JSON}
    parts["parsable"] = row_json.PARSABLE
    parts["relation"] = "told.relation"
    for name, part in (parts | {"schema": quoted(schema), "guc": schema}).items():
        text = text.replace(f"@{name}@", part)
    return text


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return sql.Identifier(name).as_string()
