"""docs/security.md gives the bounds that the server has."""

import re
from pathlib import Path

from headrace.change.glob import LONGEST_GLOB, MOST_GLOBS
from headrace.serve import _http, accept
from headrace.serve.grpc import LARGEST_REQUEST
from headrace.serve.parameters import MOST_PARAMETERS
from headrace.serve.query import LARGEST_BODY
from headrace.serve.ws.messages import LARGEST_MESSAGE

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def bound(begin: str) -> list[int]:
    """The numbers in the row of a bound."""
    (value,) = re.findall(rf"^\| {re.escape(begin)}[^|]*\| ([^|]+) \|$", PAGE.read_text(), re.M)
    return [int(number) for number in re.findall(r"\d+", value)]


def test_the_page_gives_the_bounds_that_the_server_has() -> None:
    sizes = {_http.LARGEST_HEAD, LARGEST_BODY, LARGEST_MESSAGE, LARGEST_REQUEST}
    assert {size >> 10 for size in sizes} == set(bound("a request's line"))
    assert bound("parameters of a query") == [MOST_PARAMETERS, MOST_GLOBS, LONGEST_GLOB]
    seconds = [int(_http.REQUEST_SECONDS), int(accept.HANDSHAKE_SECONDS)]
    assert bound("time for a request") == seconds
    assert bound("how long a client may take nothing") == [int(_http.STALLED_SECONDS // 60)]
