"""Names of tables as parts of other systems' names.

What a schema or a table has in its name beside letters, digits, `_` and `-` becomes `-` and two
hexadecimal digits for each byte (`order items` is `order-20items`); so does a `-` that could be
taken for one of these. Two different names therefore stay different.
"""

from __future__ import annotations

import re
from hashlib import blake2b

_NOT_PLAIN = re.compile(r"-(?=[0-9A-F]{2})|[^A-Za-z0-9_-]")
_DIGEST = 16  # hexadecimal digits


def escaped(name: str) -> str:
    """A name with only letters, digits, `_` and `-`."""
    return _NOT_PLAIN.sub(lambda found: "".join(f"-{b:02X}" for b in found[0].encode()), name)


def token(name: str) -> str:
    """The same where there must be a character, as between two dots; a schema may have no name."""
    return escaped(name) or "-"


def within(name: str, longest: int) -> str:
    """A name of ASCII, cut to so many characters; then it ends in a digest of the whole."""
    if len(name) <= longest:
        return name
    digest = blake2b(name.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{name[: longest - _DIGEST - 1]}-{digest}"
