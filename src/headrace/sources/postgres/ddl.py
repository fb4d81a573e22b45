"""The optional event trigger that writes each table's DDL into the stream, where it happened.

Without it a schema change is seen with the next row of its table, and its SQL is not known.

The function runs as the superuser who has installed it, for whoever alters a table. Its search path
names pg_temp, as the last: where it is not named it comes first, and a temporary view would be
taken for a catalog.
"""

from __future__ import annotations

import hashlib
import logging

from psycopg import sql

from ...errors import SourceRefused
from .catalog import Catalog

logger = logging.getLogger(__name__)

SETUP = """
CREATE SCHEMA IF NOT EXISTS headrace;

CREATE OR REPLACE FUNCTION headrace.describe(relation oid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_build_object(
        'oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
        'identity', CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'n' THEN 'nothing'
                                        WHEN 'f' THEN 'full' ELSE 'index' END,
        'columns', (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'name', a.attname, 'type_id', a.atttypid::bigint, 'modifier', a.atttypmod,
                'key', coalesce(a.attnum = ANY (i.indkey), false)) ORDER BY a.attnum), '[]')
            FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND (a.attgenerated = '' OR a.attgenerated = 's'
                   AND current_setting('server_version_num')::int >= 180000)))
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
               WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
    WHERE c.oid = relation AND c.relkind IN ('r', 'p')
$$;

-- As its owner: whoever alters a table need not know of this schema.
CREATE OR REPLACE FUNCTION headrace.tell_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
              WHERE classid = 'pg_catalog.pg_class'::regclass AND objsubid = 0) touched
        WHERE headrace.describe(relation) IS NOT NULL;
    END IF;
    IF told IS NOT NULL THEN
        PERFORM pg_logical_emit_message(true, 'headrace.ddl', jsonb_build_object(
            'tag', tg_tag, 'sql', current_query(), 'tables', told)::text);
    END IF;
END $$;

ALTER FUNCTION headrace.describe(oid) OWNER TO CURRENT_USER;
ALTER FUNCTION headrace.tell_ddl() OWNER TO CURRENT_USER;
"""

TRIGGERS = """
CREATE EVENT TRIGGER headrace_ddl ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE') EXECUTE FUNCTION headrace.tell_ddl();
CREATE EVENT TRIGGER headrace_drop ON sql_drop
    WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION headrace.tell_ddl();
"""


# What the function says of itself, so that an older one is known as such.
EDITION = f"headrace {hashlib.sha256(SETUP.encode()).hexdigest()[:16]}"

_INSTALLED = """
    SELECT coalesce(obj_description(evtfoid, 'pg_proc'), '')
    FROM pg_event_trigger WHERE evtname = 'headrace_ddl'"""

_UNTRUSTED_OWNERS = """
    SELECT r.rolname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
    WHERE n.nspname = 'headrace' AND NOT r.rolsuper AND r.rolname <> current_user"""


def installed(catalog: Catalog) -> str | None:
    """The edition that is there; None: there is none."""
    found = catalog.rows(_INSTALLED)
    return str(found[0][0]) if found else None


def install(catalog: Catalog) -> None:
    """Create the trigger where it is missing, and bring its functions up to date.

    Both need a superuser; anybody else goes on with what is there.
    """
    found = installed(catalog)
    if found == EDITION:
        return
    superuser = catalog.rows("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")[0][0]
    if found is not None and not superuser:
        logger.warning("the ddl event trigger is of another edition; a superuser must renew it")
        return
    for (owner,) in catalog.rows(_UNTRUSTED_OWNERS):
        raise SourceRefused(
            f"the schema headrace belongs to {owner}, who could put functions there that run as a "
            "superuser",
            hint="Run `ALTER SCHEMA headrace OWNER TO` a superuser, or set ddl: false.",
        )
    catalog.run(SETUP)
    if found is None:
        catalog.run(TRIGGERS)
    catalog.run(
        sql.SQL("COMMENT ON FUNCTION headrace.tell_ddl() IS {}").format(sql.Literal(EDITION))
    )
