"""For those who receive webhooks: whether a request is what Headrace signed, and is new.

    from headrace.client import webhooks

    event_id = webhooks.verify(body, request.headers, secret)

The body is the bytes as they came: a document that was decoded and encoded again is another one.
"""

import hmac
import time
from collections.abc import Iterable, Mapping

from ..errors import SignatureInvalid
from ..formats import signature as signatures

TOLERANCE_SECONDS = 300.0

_ID, _TIMESTAMP, _SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: str | Iterable[str],
    *,
    tolerance: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> str:
    """The id of the event or batch, by which a repeat is known; SignatureInvalid when not ours.

    It reads the headers of Standard Webhooks: they sign the id and the time beside the body, so a
    request that was caught on its way is worth nothing `tolerance` seconds later. While a secret
    is replaced by another, give both.
    """
    given = {name.lower(): value for name, value in headers.items()}
    for name in (_ID, _TIMESTAMP, _SIGNATURE):
        if not given.get(name):
            raise SignatureInvalid(f"the request has no header {name}")
    timestamp = _timestamp(given[_TIMESTAMP])
    if not _signed(body, given[_ID], timestamp, secrets, given[_SIGNATURE]):
        raise SignatureInvalid("no signature of the request fits its body and a secret")
    # After the signature: only what its sender signed says when it was sent.
    age = (time.time() if now is None else now) - timestamp
    if not abs(age) <= tolerance:  # this way round, no age is within what is no number
        word = "ago" if age > 0 else "ahead"
        raise SignatureInvalid(
            f"the request was signed {abs(age):.0f} s {word}, and {tolerance:g} s are allowed",
            hint="If it is no repeat of an old request, set the clocks of both machines.",
        )
    return given[_ID]


def verify_signature(payload: bytes, signature: str, secret: str) -> bool:
    """Whether X-Savegress-Signature fits the body; nothing in it says when it was signed.

    ValueError: the secret is empty, so that anybody could have signed it.
    """
    if not secret:
        raise ValueError("the secret is empty: anybody can sign a request with it")
    return signatures.verify(payload, signature, secret)


def _timestamp(given: str) -> int:
    # int() takes more: spaces, signs, underscores, digits of other scripts.
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise SignatureInvalid("webhook-timestamp is not a number of seconds")
    return int(given)


def _signed(
    body: bytes, message: str, timestamp: int, secrets: str | Iterable[str], given: str
) -> bool:
    offered = [each.encode(errors="replace") for each in given.split()]
    fits = False
    for secret in [secrets] if isinstance(secrets, str) else secrets:
        key = signatures.standard_key(secret)
        ours = signatures.sign_standard(body, message, timestamp, key).encode()
        for each in offered:
            fits |= hmac.compare_digest(ours, each)
    return fits
