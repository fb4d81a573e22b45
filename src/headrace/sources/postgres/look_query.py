"""What a look at a table asks the catalogs: by us, and by the event trigger where DDL happens.

Plain reads of the catalogs, since the server's own functions about them show the present, whatever
snapshot the session has.
"""

from typing import LiteralString

# {relation} is the table's oid. A column of a partitioned table has its initial default in the
# partitions. A partition was created as one when its columns were inherited from the first: what
# is attached later has them altered by that. A new table's file has its oid as a number.
# A column can become oid, regclass and the like, inet, timestamp or timestamptz without a rewrite,
# and is printed in another way from then on: these types are reported as those are that consist of
# others.
_LOOK: LiteralString = """
    SELECT jsonb_build_object(
        'oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
        'identity', CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'n' THEN 'nothing'
                                        WHEN 'f' THEN 'full' ELSE 'index' END,
        'attributes', c.relnatts,
        'constraint', coalesce((
            SELECT k.oid::bigint FROM pg_catalog.pg_constraint k
            WHERE k.conrelid = c.oid AND k.contype = 'p'), 0),
        'storage', CASE c.relkind WHEN 'r' THEN c.relfilenode::bigint ELSE 0 END,
        'columns', (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'name', a.attname, 'type_id', a.atttypid::bigint, 'modifier', a.atttypmod,
                'key', coalesce(a.attnum = ANY (i.indkey), false), 'number', a.attnum,
                'captured', a.attgenerated = '' OR a.attgenerated = 's'
                            AND current_setting('server_version_num')::int >= 180000,
                'xmin', a.xmin::text, 'default', coalesce(d.oid::bigint, 0),
                'missing', CASE
                    WHEN a.atthasmissing THEN jsonb_build_array(a.attmissingval::text)
                    WHEN c.relkind = 'p' THEN coalesce(leaves.missing -> a.attname, '[]')
                    ELSE '[]' END,
                'types', CASE
                    WHEN t.oid IN (26, 650, 869, 1114, 1184) OR left(t.typname::text, 3) = 'reg'
                        THEN jsonb_build_array(t.oid::text, '[]'::jsonb)
                    ELSE made.types END,
                'types_xid', coalesce(made.xid, 0)
                ) ORDER BY a.attnum), '[]')
            FROM pg_catalog.pg_attribute a
            JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
            LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            LEFT JOIN LATERAL ({types}) made ON t.typtype <> 'b' OR t.typelem <> 0
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
        'parts', CASE c.relkind WHEN 'p' THEN leaves.parts END)
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
               WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisprimary END
    LEFT JOIN LATERAL ({leaves}) leaves ON c.relkind = 'p'
    WHERE c.oid = {relation} AND c.relkind IN ('r', 'p')"""

_TYPES: LiteralString = """
    WITH RECURSIVE used(oid) AS (
        SELECT a.atttypid
        UNION SELECT inner_type.oid FROM used
        JOIN pg_catalog.pg_type u ON u.oid = used.oid
        LEFT JOIN pg_catalog.pg_range r ON r.rngtypid = u.oid OR r.rngmultitypid = u.oid
        CROSS JOIN LATERAL (
            SELECT u.typelem UNION ALL SELECT u.typbasetype UNION ALL SELECT r.rngsubtype
            UNION ALL SELECT f.atttypid FROM pg_catalog.pg_attribute f
            WHERE u.typtype = 'c' AND f.attrelid = u.typrelid AND f.attnum > 0
        ) inner_type(oid) WHERE inner_type.oid <> 0)
    SELECT jsonb_build_array(
        (SELECT coalesce(sum(hashtext(concat_ws(' ', f.attrelid, f.attnum, f.attname, f.xmin))
                             ::bigint), 0)::text
         FROM used JOIN pg_catalog.pg_type u ON u.oid = used.oid AND u.typtype = 'c'
         JOIN pg_catalog.pg_attribute f ON f.attrelid = u.typrelid
           AND f.attnum > 0 AND NOT f.attisdropped),
        (SELECT coalesce(jsonb_agg(hashtext(concat_ws(' ', e.oid, e.enumlabel, e.xmin))
                                   ORDER BY e.oid), '[]')
         FROM used JOIN pg_catalog.pg_enum e ON e.enumtypid = used.oid)) AS types,
        (SELECT made.xmin::text::bigint FROM used
         JOIN pg_catalog.pg_type u ON u.oid = used.oid
         CROSS JOIN LATERAL (
             SELECT e.xmin FROM pg_catalog.pg_enum e WHERE e.enumtypid = u.oid
             UNION ALL SELECT f.xmin FROM pg_catalog.pg_attribute f
             WHERE u.typtype = 'c' AND f.attrelid = u.typrelid AND f.attnum > 0) made
         WHERE made.xmin <> u.xmin ORDER BY pg_catalog.age(made.xmin) LIMIT 1) AS xid"""

_LEAVES: LiteralString = """
    WITH RECURSIVE tree(oid, created, edges) AS (
        SELECT c.oid, true, ''
        UNION ALL
        SELECT h.inhrelid, tree.created AND h.xmin = s.xmin AND EXISTS (
                   SELECT FROM pg_catalog.pg_attribute o
                   WHERE o.attrelid = h.inhrelid AND o.attnum > 0 AND o.attinhcount > 0
                     AND o.xmin = s.xmin AND o.cmin = s.cmin),
               concat_ws(' ', tree.edges, h.xmin)
        FROM tree JOIN pg_catalog.pg_inherits h ON h.inhparent = tree.oid
        JOIN pg_catalog.pg_attribute s ON s.attrelid = h.inhrelid AND s.attnum = -6),
    leaf AS (
        SELECT k.oid, tree.created AND k.relfilenode = k.oid AS created,
               hashtextextended(concat_ws(' ', k.oid, k.relfilenode, edges), 0) >> 20 AS hash
        FROM tree JOIN pg_catalog.pg_class k ON k.oid = tree.oid AND k.relkind = 'r')
    SELECT
        (SELECT jsonb_build_object('count', count(*), 'sum', coalesce(sum(hash), 0)) FROM leaf)
        || jsonb_build_object('newest', coalesce((
            SELECT jsonb_agg(jsonb_build_array(hash, created) ORDER BY oid DESC)
            FROM (SELECT * FROM leaf ORDER BY oid DESC LIMIT 100) newest), '[]')) AS parts,
        (SELECT jsonb_object_agg(attname, texts) FROM (
            SELECT m.attname, jsonb_agg(DISTINCT m.attmissingval::text) AS texts
            FROM leaf JOIN pg_catalog.pg_attribute m ON m.attrelid = leaf.oid AND m.atthasmissing
            GROUP BY m.attname) found) AS missing"""

# Whether a publication may send less than all columns; it says of generated ones from 18 on.
ANY_NARROW: LiteralString = """
    SELECT 1 FROM pg_publication_rel WHERE prattrs IS NOT NULL
    UNION ALL SELECT 1 FROM pg_publication p
    WHERE p.pubname IN (%s, %s) AND to_jsonb(p) ->> 'pubgencols' = 'n' LIMIT 1"""
LISTED_COLUMNS: LiteralString = """
    SELECT r.prattrs::int2[] FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
    WHERE r.prrelid = %s::oid AND p.pubname IN (%s, %s) AND r.prattrs IS NOT NULL"""
UNSENT_GENERATED: LiteralString = """
    SELECT a.attnum FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.oid = %s::oid AND a.attgenerated <> '' AND NOT EXISTS (
        SELECT FROM pg_publication p
        WHERE p.pubname IN (%s, %s) AND to_jsonb(p) ->> 'pubgencols' = 's' AND (
            p.puballtables
            OR EXISTS (SELECT FROM pg_publication_namespace s
                       WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)
            OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid IN (
                SELECT c.oid UNION SELECT relid::oid FROM pg_partition_ancestors(c.oid)))))"""


def look_object(relation: LiteralString) -> LiteralString:
    """The query for a table whose oid is this expression: one JSON object, or no row."""
    return (
        _LOOK.replace("{types}", _TYPES)
        .replace("{leaves}", _LEAVES)
        .replace("{relation}", relation)
    )
