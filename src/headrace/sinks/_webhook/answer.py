"""What an endpoint's answer means for the events that it was asked to take."""

from __future__ import annotations

import email.utils
import re
from collections.abc import Sequence
from datetime import UTC
from http import HTTPStatus
from typing import NamedTuple

from ...secret import MASK, Secret
from .._push import ACCEPTED, Answer, Verdict

LONGEST_AFTER = 600.0  # seconds; a receiver that wants to rest for longer is asked now and then

_GONE = 410
_LATER = {408, 425, 429}  # these say nothing of the event
# These speak of the endpoint, whatever was sent: no part of a batch would fare better.
_WHOLE = {401, 404, 405, 407}
_EXCERPT = 200
_UNPRINTED = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")


class Reply(NamedTuple):
    """What came back."""

    status: int
    retry_after: str = ""
    body: bytes = b""  # its beginning

    @property
    def gone(self) -> bool:
        """Whether the endpoint wants nothing more, for ever."""
        return self.status == _GONE

    @property
    def parted(self) -> bool:
        """Whether a part of the batch that was refused may be taken."""
        return 400 <= self.status < 500 and self.status not in _WHOLE

    @property
    def tired(self) -> bool:
        """Whether it asks for a pause before anything more."""
        return self.status == 429 or (self.status == 503 and bool(self.retry_after))


def verdict(reply: Reply, *, now: float, hidden: Sequence[Secret] = ()) -> Verdict:
    """What becomes of the events; `hidden` is what must not show should the answer repeat it."""
    status = reply.status
    if 200 <= status < 300:
        return ACCEPTED
    said = f"it answered {_phrase(status)}"
    if status >= 500 or status in _LATER or status < 200:
        return Verdict(Answer.FAILED, said, after(reply.retry_after, now))
    if status < 400:
        said += ", and redirects are not followed: set url to where the endpoint is"
    elif shown := excerpt(reply.body, hidden):
        said += f": {shown}"
    return Verdict(Answer.REFUSED, said)


def after(given: str, now: float) -> float:
    """The seconds that Retry-After asks for, as a number or as a time; what it is not, is 0."""
    if given.isascii() and given.isdigit():
        return min(float(given), LONGEST_AFTER)
    try:
        at = email.utils.parsedate_to_datetime(given)
    except ValueError:
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max(at.timestamp() - now, 0.0), LONGEST_AFTER)


def excerpt(body: bytes, hidden: Sequence[Secret]) -> str:
    """The beginning of an answer's body, on one line."""
    text = body.decode(errors="replace")
    for secret in hidden:
        text = text.replace(secret.reveal(), MASK)
    text = _UNPRINTED.sub(" ", text).strip()
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"


def _phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
