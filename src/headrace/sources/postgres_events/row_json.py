"""SQL that writes rows as JSON, whatever is in them.

An application's statement must not fail because of what it writes. row_to_json() takes over the
text of a json value as it is; to parse that text again may raise. PostgreSQL stores json that it
does not read: "\\u0000", "\\ud800", characters that the database's encoding lacks. And json and
jsonb may be nested as deep as the stack allows. So where a row holds such values, its key is made
from its columns, not from its JSON.

A cast to json is a function that the owner of a type has made. It would run as whoever has
installed this, and it may raise. So values of such types are given as they are printed.
"""

from __future__ import annotations

# A type that has a cast to json, or that may get one from somebody who is neither a superuser nor
# whoever has installed this.
OWN_JSON = """(NOT EXISTS (
            SELECT FROM pg_catalog.pg_roles o
            WHERE o.oid = t.typowner AND (o.rolsuper OR o.rolname = current_user))
        OR EXISTS (SELECT FROM pg_catalog.pg_cast c
                   WHERE c.castsource = t.oid AND c.casttarget = 114 AND c.castfunc <> 0))"""

_JSON = "(114, 199, 3802, 3807)"  # json, json[], jsonb, jsonb[]

# Whether a row's JSON can be parsed: it has no escapes, and is too short to be nested too deep. A
# level takes two characters, and less than 400 bytes of the stack. There is no backslash here: a
# session may read it as an escape.
PARSABLE = """(octet_length(written::text)
        < pg_size_bytes(current_setting('max_stack_depth')) / 512
        AND strpos(written::text, chr(92) || 'u') = 0)"""

# What of a row's JSON is made column by column: all of it, the key unless it is PARSABLE, or none.
# Types that are made of others may hold json, or types with casts. The smallest word wins.
BY_COLUMNS = f"""coalesce((
        SELECT min(CASE WHEN a.atttypid IN {_JSON} THEN 'key'
                        WHEN a.atttypid < 16384 THEN 'none'
                        ELSE (SELECT CASE WHEN t.typtype = 'c' OR t.typcategory = 'A'
                                               OR t.typbasetype >= 16384 OR @own_json@ THEN 'all'
                                          WHEN t.typbasetype IN {_JSON} THEN 'key'
                                          ELSE 'none' END
                              FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid) END)
        FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = @relation@ AND a.attnum > 0 AND NOT a.attisdropped), 'none')"""

FUNCTIONS = r"""-- Whether to_json() would call a cast of a type, or of one that it is made of.
CREATE OR REPLACE FUNCTION @schema@.has_own_json(type oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_nestloop = on AS $$
BEGIN
    RETURN EXISTS (
        WITH RECURSIVE parts(oid) AS (
            SELECT has_own_json.type
            UNION
            SELECT part.oid FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid
            CROSS JOIN LATERAL (
                SELECT t.typbasetype WHERE t.typtype = 'd'
                UNION ALL SELECT t.typelem WHERE t.typcategory = 'A'
                UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) part(oid)
            WHERE part.oid >= 16384)
        SELECT FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid WHERE @own_json@);
END $$;

-- The expression for columns of a row as JSON, of these names or all.
CREATE OR REPLACE FUNCTION @schema@.json_of(
    relation oid, entry text, names text[] DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN coalesce('(SELECT row_to_json(r.*) FROM (SELECT ' || (
        SELECT string_agg(format(
            CASE WHEN a.atttypid >= 16384 AND @schema@.has_own_json(a.atttypid)
                 THEN 'CASE num_nulls(%2$s.%1$I) WHEN 0 THEN format(''%%s'', %2$s.%1$I) END AS %1$I'
                 ELSE '%2$s.%1$I' END, a.attname, entry),
            ', ' ORDER BY array_position(names, a.attname::text), a.attnum)
        FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
          AND (names IS NULL OR a.attname = ANY (names))) || ') r)', 'NULL::json');
END $$;

-- The expression for the same columns as text, with commas: what ->> would read from their JSON.
CREATE OR REPLACE FUNCTION @schema@.text_of(relation oid, entry text, names text[]) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    shown text[] := ARRAY(
        SELECT format(
            CASE WHEN a.atttypid >= 16384 AND @schema@.has_own_json(a.atttypid)
                 THEN 'CASE num_nulls(%2$s.%1$I) WHEN 0 THEN format(''%%s'', %2$s.%1$I) END'
                 -- A string is read by its escapes, which are all of to_json()'s making.
                 ELSE 'CASE json_typeof(to_json(%2$s.%1$I)) WHEN ''null'' THEN NULL'
                      ' WHEN ''string'' THEN to_json(%2$s.%1$I) #>> ''{}'''
                      ' ELSE to_json(%2$s.%1$I)::text END' END, a.attname, entry)
        FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
          AND a.attname = ANY (names)
        ORDER BY array_position(names, a.attname::text));
BEGIN
    RETURN CASE cardinality(shown) WHEN 0 THEN 'NULL::text' WHEN 1 THEN shown[1]
                ELSE format('concat_ws('','', %s)', array_to_string(shown, ', ')) END;
END $$;

-- A row as JSON, its key as JSON, and the key as text.
CREATE OR REPLACE FUNCTION @schema@.row_parts(
    relation oid, entry record, key_columns text[], by_columns text,
    OUT written json, OUT key json, OUT identity text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp@pinned@ AS $$
BEGIN
    EXECUTE format('SELECT %s, %s, %s',
                   CASE by_columns WHEN 'all' THEN @schema@.json_of(relation, '($1)')
                                   ELSE 'row_to_json($1)' END,
                   @schema@.json_of(relation, '($1)', key_columns),
                   @schema@.text_of(relation, '($1)', key_columns))
    INTO written, key, identity USING entry;
END $$;"""
