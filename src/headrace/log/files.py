"""How many files this process may open, and how many of them are for whom.

Connections are files, too. Whatever clients do, the log and the sources must get theirs.
"""

import errno
import sys

if sys.platform != "win32":
    import resource

MOST_FILES = 65_536  # that a process is set to; beyond, some programs it starts become slow
_FOR_OTHERS = 128  # sources, the pipeline, temporary files
_FEWEST_FOR_LOG, _MOST_FOR_LOG = 32, 4096
_FEWEST_CONNECTIONS, _MOST_CONNECTIONS = 16, 20_000

TOO_MANY = (errno.EMFILE, errno.ENFILE)
HINT = (
    "This process, or the machine, has as many files and connections open as it may. Raise the "
    "limit (`ulimit -n`, or LimitNOFILE= of a systemd unit), or lower server.max_connections."
)


def file_limit() -> int:
    """How many files this process may have open at once."""
    if sys.platform == "win32":
        return MOST_FILES
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> int:
    """Let this process open as many files as it may, within reason; returns the limit."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def log_files(limit: int) -> int:
    """How many of its files a log keeps open."""
    return min(max(limit // 4, _FEWEST_FOR_LOG), _MOST_FOR_LOG)


def reserved_files(limit: int) -> int:
    """How many files are for everything but connections of clients."""
    return log_files(limit) + _FOR_OTHERS


def connections(limit: int) -> int:
    """How many connections clients may have together, unless a setting says otherwise."""
    left = limit - reserved_files(limit)
    return min(max(left, _FEWEST_CONNECTIONS), _MOST_CONNECTIONS)


def is_exhausted(error: BaseException) -> bool:
    """Whether an error is that no further file can be opened now."""
    if isinstance(error, OSError):
        return error.errno in TOO_MANY
    return "Too many open files" in str(error)  # as RocksDB says it
