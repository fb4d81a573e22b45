"""Whether the server would refuse UPDATE and DELETE on a table that is published with both.

It refuses them (CheckCmdReplicaIdentity) by the replica identity of the very table that is written
to, a partition as it may be, while row filter and column list are those of the table that is
published. A partitioned table must have an identity too, which its partitions cover: by its columns
the rows are described that are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psycopg import sql

from ...change.path import table_path
from .catalog import Catalog, inserts_name

# What is published, by which publication and with which columns and rows; `full` is the first one.
_MEMBERS = """
    SELECT p.pubname AS publication, g.relid AS oid, r.prattrs AS attributes, r.prqual AS filter,
           r.oid IS NOT NULL AS listed
    FROM pg_catalog.pg_publication p
    CROSS JOIN LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) g
    LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = g.relid
    WHERE p.pubname IN ({publication}, {inserts})
    UNION ALL
    SELECT NULL, wanted, NULL, NULL, false FROM pg_catalog.unnest({wanted}::oid[]) AS wanted"""

# The columns by which the server identifies a row of a table; null: it cannot.
_IDENTITY = """
    LEFT JOIN LATERAL (
        SELECT pg_catalog.array_agg(a.attname) AS columns,
               pg_catalog.bool_or(a.attgenerated <> '') AS generated
        FROM pg_catalog.pg_index i
        JOIN pg_catalog.pg_attribute a ON a.attrelid = {t}.oid
          AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
        WHERE i.indrelid = {t}.oid AND i.indislive AND i.indisunique AND i.indimmediate
          AND i.indisvalid AND i.indpred IS NULL
          AND CASE {t}.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident
                                    ELSE false END
    ) {identity} ON true"""

# One row for each table that is written to, and for each partitioned one. "": nothing is refused.
JUDGED = """
    SELECT m.publication, m.oid AS root, m.listed, m.attributes, m.filter, t.oid AS relation,
           identity.columns AS identity,
           CASE
             WHEN t.relreplident = 'f' AND m.attributes IS NOT NULL THEN 'list'
             WHEN t.relreplident = 'f' AND has.virtual THEN 'virtual'
             WHEN t.relreplident = 'f' AND has.stored AND sent.generated <> 's' THEN 'generated'
             WHEN t.relreplident = 'f' THEN ''
             WHEN identity.columns IS NULL THEN 'identity'
             WHEN root.relreplident = 'f' OR NOT root_identity.columns <@ identity.columns
               THEN 'mixed'
             WHEN m.attributes IS NOT NULL AND NOT identity.columns <@ ARRAY(
                 SELECT a.attname FROM pg_catalog.pg_attribute a
                 WHERE a.attrelid = m.oid AND a.attnum = ANY (m.attributes)) THEN 'columns'
             WHEN m.filter IS NOT NULL AND NOT ARRAY(
                 SELECT coalesce(a.attname, '')
                 FROM pg_catalog.regexp_matches(m.filter::text, ':varattno (-?[0-9]+)', 'g') AS v
                 LEFT JOIN pg_catalog.pg_attribute a
                   ON a.attrelid = m.oid AND a.attnum = v[1]::int) <@ identity.columns THEN 'filter'
             WHEN m.attributes IS NULL AND identity.generated AND sent.generated <> 's'
               THEN 'generated'
             ELSE ''
           END AS reason
    FROM ({members}) m
    CROSS JOIN LATERAL (
        SELECT p.relid::oid FROM pg_catalog.pg_partition_tree(m.oid) p UNION SELECT m.oid) leaf
    JOIN pg_catalog.pg_class t ON t.oid = leaf.relid AND t.relkind IN ('r', 'p')
    {identity of t}
    JOIN pg_catalog.pg_class root ON root.oid = m.oid
    {identity of root}
    LEFT JOIN LATERAL (
        SELECT pg_catalog.bool_or(a.attgenerated = 's') AS stored,
               pg_catalog.bool_or(a.attgenerated = 'v') AS virtual
        FROM pg_catalog.pg_attribute a
        WHERE t.relreplident = 'f' AND a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
    ) has ON true
    LEFT JOIN LATERAL (  -- from 18 on; before that nobody asks
        SELECT pg_catalog.to_jsonb(p) ->> 'pubgencols' AS generated
        FROM pg_catalog.pg_publication p WHERE p.pubname = {publication}
    ) sent ON true""".replace(
    "{identity of t}", _IDENTITY.replace("{t}", "t").replace("{identity}", "identity")
).replace(
    "{identity of root}", _IDENTITY.replace("{t}", "root").replace("{identity}", "root_identity")
)

_DESCRIBED = """
    SELECT coalesce(j.publication, ''), j.root::bigint, j.listed, n.nspname, c.relname,
           (SELECT array_agg(a.attname ORDER BY a.attnum) FROM pg_attribute a
            WHERE a.attrelid = j.root AND a.attnum = ANY (j.attributes)),
           pg_get_expr(j.filter, j.root),
           j.relation::bigint, tn.nspname, t.relname, t.relreplident, j.reason,
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = t.oid AND i.indisprimary
                   AND i.indimmediate AND i.indisvalid),
           EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = t.oid AND a.attgenerated = 'v'),
           coalesce(j.identity, ARRAY[]::name[])
    FROM ({judged}) j
    JOIN pg_class c ON c.oid = j.root JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_class t ON t.oid = j.relation JOIN pg_namespace tn ON tn.oid = t.relnamespace
    ORDER BY 4, 5, j.relation <> j.root, 9, 10"""


@dataclass(frozen=True, slots=True)
class Written:
    """A table that is written to, perhaps as a part of another; or a partitioned one."""

    oid: int
    schema: str
    name: str
    identity: str  # as pg_class has it: d, n, f, i
    reason: str  # why the server would refuse UPDATE and DELETE; "": it would not
    has_key: bool  # whether REPLICA IDENTITY DEFAULT would do
    has_virtual: bool  # a generated column that is not stored: then FULL would not do (18)
    key: Sequence[str]  # the columns of its identity

    @property
    def quoted(self) -> str:
        """Its name in SQL."""
        return sql.Identifier(self.schema, self.name).as_string()


@dataclass(frozen=True, slots=True)
class Member:
    """A table of either publication, or one that is to be."""

    publication: str  # "": not published yet
    oid: int
    listed: bool  # by its own name, not with its schema or the whole database
    schema: str
    name: str
    columns: Sequence[str] | None  # None: all of them
    filter: str | None
    parts: tuple[Written, ...] = ()

    @property
    def path(self) -> str:
        """schema.table, as the config and the status write it."""
        return table_path(self.schema, self.name)

    @property
    def refused(self) -> list[Written]:
        """Where the server would refuse UPDATE and DELETE."""
        return [part for part in self.parts if part.reason]

    @property
    def published(self) -> str:
        """As a publication is given it: with the columns and rows that are sent."""
        columns = "" if self.columns is None else f" ({_list(self.columns)})"
        rows = f" WHERE ({self.filter})" if self.filter else ""
        return f"TABLE ONLY {self.quoted}{columns}{rows}"

    @property
    def quoted(self) -> str:
        """Its name in SQL."""
        return sql.Identifier(self.schema, self.name).as_string()


def members(catalog: Catalog, publication: str, *, wanted: Iterable[int] = ()) -> list[Member]:
    """The tables of a publication and of its second one, and others that are wanted."""
    query = _DESCRIBED.replace("{judged}", JUDGED.replace("{members}", _MEMBERS))
    found: dict[tuple[str, int], Member] = {}
    filled = sql.SQL(query).format(
        publication=sql.Literal(publication),
        inserts=sql.Literal(inserts_name(publication)),
        wanted=sql.Literal(list(wanted)),
    )
    for row in catalog.rows(filled):
        of, oid = row[:2]
        member = found.get((of, oid)) or Member(*row[:7])
        found[of, oid] = dataclasses.replace(member, parts=(*member.parts, Written(*row[7:])))
    return list(found.values())


def remedy(publication: str, member: Member) -> str:
    """The statements after which all of a table that is captured for inserts only can be."""
    if not member.refused:
        return _swap(publication, member)
    fixes = [_remedy(publication, member, part) for part in member.refused]
    whole = member.parts[0]
    if fixes[:1] == [_full(whole)] or (whole.identity == "f" and not whole.reason):
        # Then its partitions must have the same.
        fixes += [_full(part) for part in member.parts if part.identity != "f"]
    return " ".join(dict.fromkeys(fixes))


def _remedy(publication: str, member: Member, part: Written) -> str:
    if part.reason == "generated":
        return f"ALTER PUBLICATION {_quoted(publication)} SET (publish_generated_columns = stored);"
    if part.reason == "columns":
        columns = dict.fromkeys([*(member.columns or ()), *part.key])
        wider = dataclasses.replace(member, columns=list(columns))
        return _swap(publication, wider)
    whole = member.parts[0]
    # The key of a partition will do if it is that of the whole.
    keyed = part is whole or (whole.has_key and (whole.identity != "f" or whole.reason))
    if part.has_key and keyed and part.reason != "filter":
        return f"ALTER TABLE {part.quoted} REPLICA IDENTITY DEFAULT;"
    if part.has_virtual or member.columns is not None:
        return f"/* {part.quoted} needs a primary key, within the columns that are published */"
    return _full(part)


def _swap(publication: str, member: Member) -> str:
    first, second = map(_quoted, (publication, inserts_name(publication)))
    return (
        f"ALTER PUBLICATION {second} DROP TABLE ONLY {member.quoted}; "
        f"ALTER PUBLICATION {first} ADD {member.published};"
    )


def _full(part: Written) -> str:
    return f"ALTER TABLE {part.quoted} REPLICA IDENTITY FULL;"


def _list(columns: Iterable[str]) -> str:
    return ", ".join(map(_quoted, columns))


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
