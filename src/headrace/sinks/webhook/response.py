"""What the response of an endpoint means for the events that were posted."""

from __future__ import annotations

import email.utils
import re
from collections.abc import Iterable
from datetime import UTC
from http import HTTPStatus
from typing import NamedTuple

from ...secret import MASK, Secret
from ..push import ACCEPTED, DeliveryOutcome, Reply

LONGEST_AFTER = 600.0  # seconds; an endpoint that asks for a longer pause is tried after these

_GONE = 410
_TOO_MANY = 429
_LATER = {408, 425}  # these are not about the event
# These are about the endpoint, whatever was sent: no part of a batch would be accepted.
_WHOLE = {401, 404, 405, 407}
_EXCERPT = 200
_UNPRINTED = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")

# Letters and digits come through every escape as they are: \/, \u003d, %3D, &amp;.
_WORD = re.compile(r"[^\W_]+")
_LONG = 4  # letters; what is shorter is hidden only where it stands alone
_TELLING = 6  # letters of a secret that already give some of it away when they show alone


class SecretMask:
    """Masks secrets in a text, however they were escaped or cut off on their way."""

    __slots__ = ("_all", "_short", "_texts", "_words")

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        texts = {secret.reveal() for secret in secrets} - {""}
        # The longest before what they hold.
        self._texts = sorted((each for each in texts if len(each) >= _LONG), key=len, reverse=True)
        short = "|".join(re.escape(each) for each in texts if len(each) < _LONG)
        self._short = re.compile(rf"(?<![^\W_])(?:{short or '(?!)'})(?![^\W_])", re.IGNORECASE)
        self._all = "\n".join(self._texts).lower()
        self._words = {each for each in _WORD.findall(self._all) if len(each) >= _LONG}

    def __repr__(self) -> str:
        return "SecretMask()"

    def masked(self, text: str) -> str:
        """The text without the secrets."""
        for secret in self._texts:
            text = text.replace(secret, MASK)
        return self._short.sub(MASK, _WORD.sub(self._mask, text))

    def _mask(self, found: re.Match[str]) -> str:
        word = found[0].lower()
        part = len(word) >= _TELLING and word in self._all
        return MASK if part or any(each in word for each in self._words) else found[0]


_NO_SECRETS = SecretMask()


class HttpResponse(NamedTuple):
    """The status, and what else counts."""

    status: int
    retry_after: str = ""
    body: bytes = b""  # its beginning

    @property
    def gone(self) -> bool:
        """Whether the endpoint wants nothing more, for ever."""
        return self.status == _GONE

    @property
    def splits_batch(self) -> bool:
        """Whether a part of the refused batch may be accepted."""
        return 400 <= self.status < 500 and self.status not in _WHOLE

    @property
    def throttles(self) -> bool:
        """Whether it asks for a pause before the next request."""
        return self.status == _TOO_MANY or (self.status == 503 and bool(self.retry_after))


def reply_to(response: HttpResponse, *, now: float, mask: SecretMask = _NO_SECRETS) -> Reply:
    """The reply for the events of a request; `mask` hides secrets that the response repeats."""
    status = response.status
    if 200 <= status < 300:
        return ACCEPTED
    reason = f"it answered {_phrase(status)}"
    if status == _GONE:
        return Reply(DeliveryOutcome.UNSENT, reason)  # it is not about the event
    if status == _TOO_MANY:
        # It is about the rate of requests, so it is not counted as an attempt.
        return Reply(DeliveryOutcome.UNSENT, reason, retry_seconds(response.retry_after, now))
    if status >= 500 or status in _LATER or status < 200:
        return Reply(DeliveryOutcome.FAILED, reason, retry_seconds(response.retry_after, now))
    if status < 400:
        reason += ", and redirects are not followed: set url to where the endpoint is"
    elif shown := excerpt(response.body, mask):
        reason += f": {shown}"
    return Reply(DeliveryOutcome.REFUSED, reason)


def retry_seconds(given: str, now: float) -> float:
    """The seconds of a Retry-After header, a number or a time; 0: it is neither."""
    if given.isascii() and given.isdigit():
        return min(float(given), LONGEST_AFTER)
    try:
        at = email.utils.parsedate_to_datetime(given)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, OverflowError):  # no time, or one out of range
        return 0.0
    return min(max(seconds, 0.0), LONGEST_AFTER)


def excerpt(body: bytes, mask: SecretMask) -> str:
    """The beginning of a response's body, on one line."""
    text = _UNPRINTED.sub(" ", mask.masked(body.decode(errors="replace"))).strip()
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"


def _phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
