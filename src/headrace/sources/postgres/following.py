"""How the resume follows DDL: looks, tables to read anew, tables that are gone. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from .catalog import Published
from .looks import LookState
from .resume import PostgresResume


def with_looks(resume: PostgresResume, looks: Mapping[str, LookState]) -> PostgresResume:
    """Note what the last look at each table has left."""
    changed = {
        path: msgspec.structs.replace(copy, look=looks[path])
        for path, copy in resume.snapshots.items()
        if path in looks and copy.ranges is not None and copy.look != looks[path]
    }
    if not changed:
        return resume
    return msgspec.structs.replace(resume, snapshots=resume.snapshots | changed)


def read_anew(resume: PostgresResume, tables: Collection[str]) -> PostgresResume:
    """Begin the snapshots of tables anew whose rows in the log are not theirs any more."""
    begun = {path for path in tables if _begun(resume, path)}
    return resume.anew(begun) if begun else resume


def _begun(resume: PostgresResume, path: str) -> bool:
    copy = resume.snapshots.get(path)
    return copy is not None and copy.ranges is not None


def without_gone(resume: PostgresResume, gone: Collection[str]) -> PostgresResume:
    """Forget tables of which the log has that they are gone."""
    known = [path for path in gone if path in resume.snapshots]
    if not known and not resume.leaving.keys() & gone:
        return resume
    return msgspec.structs.replace(
        resume,
        snapshots={path: copy for path, copy in resume.snapshots.items() if path not in known},
        errored={path: why for path, why in resume.errored.items() if path not in known},
        former=(*resume.former, *known),
        leaving={path: oid for path, oid in resume.leaving.items() if path not in gone},
    )


def with_leaving(
    resume: PostgresResume, tables: Sequence[Published], paths: Mapping[int, str]
) -> PostgresResume:
    """Note tables that were dropped or have got another name; `paths` are those of now, by oid.

    A name that another table has got is not given up: that table's snapshot begins with nothing.
    """
    published = {table.path for table in tables}
    left = {
        path: copy
        for path, copy in resume.snapshots.items()
        if path not in published and paths.get(copy.relation) != path
    }
    leaving = {
        path: copy.announced for path, copy in left.items() if copy.ranges is not None or copy.again
    }
    stays = {path: oid for path, oid in resume.leaving.items() if path not in published}
    if not left and stays == resume.leaving:
        return resume
    return msgspec.structs.replace(
        resume,
        snapshots={path: copy for path, copy in resume.snapshots.items() if path not in left},
        errored={path: why for path, why in resume.errored.items() if path not in left},
        former=(*resume.former, *leaving),
        leaving=stays | leaving,
    )
