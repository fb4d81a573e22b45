"""Signatures by which a receiver knows that a body is ours and whole."""

import base64
import hashlib
import hmac

STANDARD_SECRET = "whsec_"  # what a secret begins with whose key is written in Base64


def sign(body: bytes, secret: str) -> str:
    """`sha256=` and the HMAC-SHA256 of the body as it is sent, byte for byte."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


def verify(body: bytes, signature: str, secret: str) -> bool:
    """Whether a body was signed with this secret; it takes as long for every wrong signature."""
    # Bytes: of text, only ASCII can be compared in constant time, and anybody may send anything.
    return hmac.compare_digest(sign(body, secret).encode(), signature.encode(errors="replace"))


def standard_key(secret: str) -> bytes:
    """The key of a secret for Standard Webhooks; ValueError: no key can be read from it.

    Any other secret than `whsec_…` is its own key, as it is for `sign`.
    """
    if not secret.startswith(STANDARD_SECRET):
        key = secret.encode()
    else:
        try:
            key = base64.b64decode(secret.removeprefix(STANDARD_SECRET), validate=True)
        except ValueError:  # also of letters beyond ASCII
            raise ValueError(f"what follows {STANDARD_SECRET} is not Base64") from None
    if not key:
        raise ValueError("it is empty")
    return key


def sign_standard(body: bytes, message: str, timestamp: int, key: bytes) -> str:
    """`v1,` and what Standard Webhooks signs: the message's id, the time in seconds, the body."""
    signed = b"%b.%d.%b" % (message.encode(errors="replace"), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
