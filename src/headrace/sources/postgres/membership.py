"""How each table is published, as a short text that another one replaces whenever that was edited.

A table that was taken out of its publication and put back, or whose publication sent less for a
while, looks as before; but changes are missing. Its row in the catalogs is another one then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...change.path import table_path
from .catalog import Catalog, inserts_name, matches

UNPUBLISHED = "-"  # the mark of a table that was seen in no publication

# ALTER PUBLICATION … SET writes the publication's row anew, and so does a change of its owner. A
# row that lists a table is never altered: another filter or column list comes with another oid. A
# partition that is sent as itself may be listed by a table above it. A table that is published with
# its schema may have been in another one for a while: then the row of its type was written anew.
_MARKS = """
    SELECT n.nspname, c.relname, p.oid::bigint, p.xmin::text,
           ARRAY(SELECT r.oid::bigint FROM pg_publication_rel r
                 WHERE r.prpubid = p.oid AND r.prrelid IN (
                     SELECT g.relid UNION SELECT relid::oid FROM pg_partition_ancestors(g.relid))
                 ORDER BY 1),
           ARRAY(SELECT unnest(ARRAY[s.oid::bigint, y.xmin::text::bigint])
                 FROM pg_publication_namespace s JOIN pg_type y ON y.oid = c.reltype
                 WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)
    FROM pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname::text) g
    JOIN pg_class c ON c.oid = g.relid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE p.pubname IN (%s, %s) ORDER BY p.pubname = %s"""

# A partition counts as a part of the whole, which cannot be unlogged itself.
_UNLOGGED = """
    SELECT rn.nspname, r.relname, n.nspname, c.relname, format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_class r ON r.oid = coalesce(pg_partition_root(c.oid)::oid, c.oid)
    JOIN pg_namespace rn ON rn.oid = r.relnamespace
    WHERE c.relkind = 'r' AND c.relpersistence = 'u'
      AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'headrace')
    ORDER BY 1, 2, 3, 4"""


def unlogged_tables(catalog: Catalog, globs: Sequence[str]) -> dict[str, str]:
    """Tables that match, and yet never show in the write-ahead log, with what changes that."""
    return {
        table_path(schema, name): f"ALTER TABLE {quoted} SET LOGGED;"
        for root_schema, root, schema, name, quoted in catalog.rows(_UNLOGGED)
        if matches(table_path(root_schema, root), globs)
    }


def publication_marks(catalog: Catalog, publication: str) -> dict[str, str]:
    """The mark of each table of a publication, or else of the one for inserts beside it."""
    names = (publication, inserts_name(publication), publication)
    return {
        table_path(schema, name): hashlib.blake2b(repr(rows).encode(), digest_size=4).hexdigest()
        for schema, name, *rows in catalog.rows(_MARKS, *names)
    }
