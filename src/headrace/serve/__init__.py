"""(3a) The log -> clients, in milliseconds: poll, stream, and what an operator needs.

    log -> feed (read and encoded once) -> subscription (filter, resume, order, waiting) -> a route

`app.py` lists the routes. A transport only frames what its subscription delivers.
"""

from .app import create_app
from .run import BackgroundServer, serve
from .settings import ServerSettings

__all__ = ["BackgroundServer", "ServerSettings", "create_app", "serve"]
