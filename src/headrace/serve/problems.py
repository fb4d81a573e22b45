"""What went wrong with a request, as JSON."""

import logging
from typing import Any
from urllib.parse import quote

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from ..errors import HeadraceError

logger = logging.getLogger(__name__)

LONGEST_VALUE = 200  # characters of a refused value that are sent back


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every answer that is an error."""

    error: str  # one word for programs
    message: str  # one sentence for people
    parameter: str | None = None  # what was wrong …
    value: str | None = None  # … and its value
    known: list[str] | None = None  # what would have been right
    hint: str | None = None


class RequestRefused(HTTPException):
    """The request cannot be answered as it stands."""

    def __init__(
        self, status_code: int, problem: Problem, *, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail=problem.message, status_code=status_code, headers=headers)
        self.problem = problem


def invalid_parameter(parameter: str, value: str, message: str) -> RequestRefused:
    """A parameter, header or field has a value that it cannot have."""
    shown = value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "…"
    problem = Problem("invalid_parameter", message, parameter=parameter, value=shown)
    return RequestRefused(400, problem)


def refuse(request: Request[Any, Any, Any], error: RequestRefused) -> Response[Problem]:
    """A request we refused."""
    return _answer(error.problem, error.status_code, error.headers)


def refuse_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[Problem]:
    """A request the framework refused: no such route, wrong method, too large a body."""
    names = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    messages = {
        404: f"there is nothing at {request.url.path}; /openapi.json lists what there is",
        405: f"{request.url.path} does not take {request.method}",
        413: "the body is too large",
    }
    status = error.status_code
    problem = Problem(
        names.get(status, "bad_request" if status < 500 else "server_error"),
        messages.get(status, error.detail),
    )
    return _answer(problem, status, error.headers)


def refuse_failed(request: Request[Any, Any, Any], error: HeadraceError) -> Response[Problem]:
    """Something Headrace stands on does not work now."""
    logger.error("path=%s error=%s", _path(request), error)
    return _answer(Problem("unavailable", str(error), hint=error.hint or None), 503)


def refuse_bug(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """A mistake of ours: the log has the details, the answer has none."""
    logger.error("path=%s", _path(request), exc_info=error)
    return _answer(Problem("server_error", "the server failed; its log says why"), 500)


def _path(request: Request[Any, Any, Any]) -> str:
    """As it was sent, percent-encoded: a line end in it would begin a line of the log."""
    return quote(request.url.path)


def _answer(
    problem: Problem, status: int, headers: dict[str, str] | None = None
) -> Response[Problem]:
    return Response(
        problem, status_code=status, media_type="application/json", headers=headers or {}
    )
