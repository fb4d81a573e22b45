"""The optional event triggers: one writes each table's DDL into the stream, where it happened.

Without it DDL is noticed with the next row of its table or the next look at the catalogs, and its
SQL is not known. The other moves a table that loses its replica identity to the publication for
inserts, in the same transaction; what goes wrong in that one makes no statement fail, it is written
to the server's log. (A block with EXCEPTION in the first one would be a subtransaction, and move
its message.)

The function runs as the superuser who has installed it, for whoever alters a table. Its search path
names pg_temp, as the last: where it is not named it comes first, and a temporary view would be
taken for a catalog.
"""

from __future__ import annotations

import hashlib
import logging

from psycopg import sql

from ...errors import SourceRefused, SourceUnavailable
from .catalog import Catalog
from .identity import JUDGED
from .look_query import look_object

logger = logging.getLogger(__name__)

_SETUP = """
CREATE SCHEMA IF NOT EXISTS headrace;

CREATE OR REPLACE FUNCTION headrace.describe(relation oid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
-- Values are printed as the stream prints them.
SET DateStyle = ISO SET IntervalStyle = iso_8601 SET TimeZone = 'UTC' SET extra_float_digits = 3
SET bytea_output = hex SET lc_monetary = 'C' AS $$
    {look}
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
    ELSIF tg_event = 'table_rewrite' THEN
        told := jsonb_build_array(jsonb_build_object(
            'oid', coalesce(pg_partition_root(pg_event_trigger_table_rewrite_oid())::oid,
                            pg_event_trigger_table_rewrite_oid())::bigint,
            'schema', '', 'name', '', 'identity', 'default', 'rewritten', true));
    ELSE
        SELECT jsonb_agg(look) INTO told FROM (
            SELECT headrace.describe(relation) AS look
            FROM (SELECT DISTINCT coalesce(pg_partition_root(objid)::oid, objid) AS relation
                  FROM pg_event_trigger_ddl_commands()
                  WHERE classid = 'pg_catalog.pg_class'::regclass
                    AND (objsubid = 0 OR tg_tag = 'COMMENT')) touched) looks
        WHERE look IS NOT NULL;
    END IF;
    IF told IS NOT NULL THEN
        PERFORM pg_logical_emit_message(true, 'headrace.ddl', jsonb_build_object(
            'tag', tg_tag, 'tables', told,
            -- A comment may be of any length.
            'sql', CASE tg_tag WHEN 'COMMENT' THEN left(current_query(), 8192)
                               ELSE current_query() END)::text);
    END IF;
END $$;

-- Both publications have one owner: nobody can have tables put into those of another. What goes
-- wrong here is left to `headrace run`, which looks every second.
CREATE OR REPLACE FUNCTION headrace.keep_writable() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' SET jit = off AS $$
DECLARE
    pair record;
    refused record;
    note jsonb;
BEGIN
    FOR pair IN
        SELECT a.pubname AS publication, b.pubname AS inserts, b.oid
        FROM pg_publication a JOIN pg_publication b
          ON b.pubowner = a.pubowner AND b.pubname = a.pubname || '_inserts'
        WHERE NOT a.puballtables AND obj_description(b.oid, 'pg_publication') LIKE '%"headrace":%'
    LOOP
        note := obj_description(pair.oid, 'pg_publication')::jsonb;
        CONTINUE WHEN note ->> 'headrace' IS DISTINCT FROM pair.publication
            OR note ->> 'made' IS DISTINCT FROM 'true';
        FOR refused IN
            SELECT relation, c.relreplident FROM ({judged}) j
            JOIN pg_class c ON c.oid = relation
            WHERE note ->> 'full' = 'true' AND reason IN ('identity', 'mixed')
              AND attributes IS NULL AND NOT EXISTS (
                SELECT FROM pg_attribute WHERE attrelid = relation AND attgenerated = 'v')
        LOOP
            note := note || jsonb_build_object('identities', jsonb_build_object(
                refused.relation::text, translate(refused.relreplident, 'i', 'n'))
                || coalesce(note -> 'identities', '{}'));
            EXECUTE format('ALTER TABLE ONLY %s REPLICA IDENTITY FULL', refused.relation::regclass);
            EXECUTE format('COMMENT ON PUBLICATION %I IS %L', pair.inserts, note);
        END LOOP;
        FOR refused IN
            SELECT DISTINCT ON (root) root::regclass AS root, pg_get_expr(filter, root) AS filter,
                (SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
                 WHERE attrelid = root AND attnum = ANY (attributes)) AS columns
            FROM ({judged}) j WHERE reason <> ''
        LOOP
            EXECUTE format('ALTER PUBLICATION %I DROP TABLE ONLY %s',
                           pair.publication, refused.root);
            EXECUTE format('ALTER PUBLICATION %I ADD TABLE ONLY %s %s %s', pair.inserts,
                           refused.root, '(' || refused.columns || ')',
                           'WHERE (' || refused.filter || ')');
        END LOOP;
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE LOG 'headrace: a table without a replica identity is still published: %', SQLERRM;
END $$;

ALTER FUNCTION headrace.describe(oid) OWNER TO CURRENT_USER;
ALTER FUNCTION headrace.tell_ddl() OWNER TO CURRENT_USER;
ALTER FUNCTION headrace.keep_writable() OWNER TO CURRENT_USER;
"""

# The tables of a first publication, each by its own name.
_LISTED = """
    SELECT p.pubname AS publication, r.prrelid AS oid, r.prattrs AS attributes, r.prqual AS filter,
           true AS listed
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    WHERE p.pubname = pair.publication"""

SETUP = _SETUP.replace(
    "{judged}", JUDGED.replace("{members}", _LISTED).replace("{publication}", "pair.publication")
).replace("{look}", look_object("relation"))

_TRIGGERS = {
    "headrace_ddl": """ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE') EXECUTE FUNCTION headrace.tell_ddl();""",
    # One of its own: a trigger that an earlier version has created stays as it is.
    "headrace_comments": """ON ddl_command_end
    WHEN TAG IN ('COMMENT') EXECUTE FUNCTION headrace.tell_ddl();""",
    "headrace_rewrite": """ON table_rewrite
    EXECUTE FUNCTION headrace.tell_ddl();""",
    "headrace_drop": """ON sql_drop
    WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION headrace.tell_ddl();""",
    "headrace_keys": """ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE') EXECUTE FUNCTION headrace.keep_writable();""",
    "headrace_keys_drop": """ON sql_drop
    WHEN TAG IN ('DROP INDEX', 'DROP TYPE', 'DROP DOMAIN', 'DROP SCHEMA', 'DROP OWNED',
                 'DROP EXTENSION') EXECUTE FUNCTION headrace.keep_writable();""",
}

TRIGGERS = "\n".join(f"CREATE EVENT TRIGGER {name} {what}" for name, what in _TRIGGERS.items())

# What the function says of itself, so that an older one is known as such.
EDITION = f"headrace {hashlib.sha256((SETUP + TRIGGERS).encode()).hexdigest()[:16]}"

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
    """Create the triggers that are missing, and bring their functions up to date.

    Both need a superuser; anybody else goes on with what is there. What has to wait for a lock is
    left to a later call.
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
    present = {name for (name,) in catalog.rows("SELECT evtname FROM pg_event_trigger")}
    missing = [f"CREATE EVENT TRIGGER {n} {on}" for n, on in _TRIGGERS.items() if n not in present]
    edition = sql.SQL("COMMENT ON FUNCTION headrace.tell_ddl() IS {}").format(sql.Literal(EDITION))
    try:
        catalog.alter(*(sql.Composed([sql.SQL(text)]) for text in (SETUP, *missing)), edition)
    except SourceUnavailable as error:
        if not catalog.connected:
            raise
        logger.warning("the ddl event trigger is installed later: %s", error)
