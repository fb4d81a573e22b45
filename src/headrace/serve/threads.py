"""Work that takes long for one request, beside that of the others.

Threads share one interpreter, so that a few are as fast as many; and whoever reads a page must not
wait for a thread until those that read everything have one to spare.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")

_slow = ThreadPoolExecutor(_THREADS, thread_name_prefix="slow")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that takes long, one of few at a time."""
    call = partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_slow, call)
