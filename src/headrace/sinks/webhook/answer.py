"""What an endpoint's answer means for the events that it was asked to take."""

from __future__ import annotations

import email.utils
import re
from datetime import UTC
from http import HTTPStatus
from typing import NamedTuple

from ..push import ACCEPTED, Answer, Verdict
from .hiding import Hidden

LONGEST_AFTER = 600.0  # seconds; a receiver that wants to rest for longer is asked now and then

_GONE = 410
_TOO_MANY = 429
_LATER = {408, 425}  # these say nothing of the event
# These speak of the endpoint, whatever was sent: no part of a batch would fare better.
_WHOLE = {401, 404, 405, 407}
_EXCERPT = 200
_NOTHING = Hidden()
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
        return self.status == _TOO_MANY or (self.status == 503 and bool(self.retry_after))


def verdict(reply: Reply, *, now: float, hidden: Hidden = _NOTHING) -> Verdict:
    """What becomes of the events; `hidden` is what must not show should the answer repeat it."""
    status = reply.status
    if 200 <= status < 300:
        return ACCEPTED
    said = f"it answered {_phrase(status)}"
    if status == _GONE:
        return Verdict(Answer.UNSENT, said)  # nor is it about the event
    if status == _TOO_MANY:
        # It is about how many there are, so it is no attempt at this one.
        return Verdict(Answer.UNSENT, said, after(reply.retry_after, now))
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
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, OverflowError):  # no time at all, or one beyond all years
        return 0.0
    return min(max(seconds, 0.0), LONGEST_AFTER)


def excerpt(body: bytes, hidden: Hidden) -> str:
    """The beginning of an answer's body, on one line."""
    text = _UNPRINTED.sub(" ", hidden.masked(body.decode(errors="replace"))).strip()
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"


def _phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
