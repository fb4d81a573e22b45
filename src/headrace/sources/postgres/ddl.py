"""The optional event trigger that writes each table's DDL into the stream, where it happened.

Without it a schema change is seen with the next row of its table, and its SQL is not known.
"""

from __future__ import annotations

from .catalog import Catalog

SETUP = """
CREATE SCHEMA IF NOT EXISTS headrace;

CREATE OR REPLACE FUNCTION headrace.describe(relation oid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
    SELECT jsonb_build_object(
        'oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
        'identity', CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'n' THEN 'nothing'
                                        WHEN 'f' THEN 'full' ELSE 'index' END,
        'columns', (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'name', a.attname, 'type_id', a.atttypid::bigint, 'modifier', a.atttypmod,
                'key', coalesce(a.attnum = ANY (i.indkey), false)) ORDER BY a.attnum), '[]')
            FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND (a.attgenerated = '' OR a.attgenerated = 's'
                   AND current_setting('server_version_num')::int >= 180000)))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_index i ON i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
               WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
    WHERE c.oid = relation AND c.relkind IN ('r', 'p')
$$;

-- As its owner: whoever alters a table need not know of this schema.
CREATE OR REPLACE FUNCTION headrace.tell_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    told jsonb;
BEGIN
    IF tg_event = 'sql_drop' THEN
        SELECT jsonb_agg(jsonb_build_object('oid', objid::bigint, 'schema', schema_name,
                                            'name', object_name, 'identity', 'default'))
        INTO told FROM pg_event_trigger_dropped_objects() WHERE object_type = 'table';
    ELSE
        SELECT jsonb_agg(headrace.describe(relation)) INTO told
        FROM (SELECT DISTINCT objid AS relation FROM pg_event_trigger_ddl_commands()
              WHERE classid = 'pg_class'::regclass AND objsubid = 0) touched
        WHERE headrace.describe(relation) IS NOT NULL;
    END IF;
    IF told IS NOT NULL THEN
        PERFORM pg_logical_emit_message(true, 'headrace.ddl', jsonb_build_object(
            'tag', tg_tag, 'sql', current_query(), 'tables', told)::text);
    END IF;
END $$;
"""

TRIGGERS = """
CREATE EVENT TRIGGER headrace_ddl ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE') EXECUTE FUNCTION headrace.tell_ddl();
CREATE EVENT TRIGGER headrace_drop ON sql_drop
    WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION headrace.tell_ddl();
"""


def install(catalog: Catalog) -> None:
    """Create the trigger where it is missing, and bring its functions up to date.

    Both need a superuser; anybody else goes on with what is there.
    """
    there = catalog.rows("SELECT 1 FROM pg_event_trigger WHERE evtname = 'headrace_ddl'")
    superuser = catalog.rows("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")[0][0]
    if superuser or not there:
        catalog.run(SETUP)
    if not there:
        catalog.run(TRIGGERS)
