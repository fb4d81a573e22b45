"""What a storage said when it failed, for a person: one line, without secrets."""

import html
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_LONGEST = 300
_SHORTEST_SECRET = 4  # a shorter value of an option, such as `1` or `yes`, hides nothing
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_QUERY = re.compile(r"\?\S*")
_LINK = "↳"  # delta-rs has a line for each cause, the last being the first


def refusal(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The innermost reason; values of the storage's options are masked.

    >>> refusal(OSError(13, "Permission denied", "/lake"))
    'Permission denied'
    """
    # What pyarrow raises has a number, but a text of its own that says more.
    spoken = getattr(error, "strerror", None) or _innermost(_COLOURS.sub("", str(error)))
    # The longest first: one may be the beginning of another.
    for value in sorted((options or {}).values(), key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            spoken = spoken.replace(value, "***")
    shown = " ".join(spoken.split())
    return shown[:_LONGEST] or type(error).__name__


def has_login(address: str) -> bool:
    """Whether an address has a user or a password in it, which messages would show.

    >>> has_login("https://lake:secret@unity.example.com"), has_login("https://example.com/@x")
    (True, False)
    """
    return "@" in urlsplit(address).netloc


def _innermost(text: str) -> str:
    """What S3 and its like answered, or the last cause that delta-rs names.

    >>> _innermost("Generic S3 error\\n ↳ 404\\n ↳ <Error><Code>NoSuchBucket</Code></Error>")
    'NoSuchBucket'
    """
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code:
        words = html.unescape(message[1]).strip().rstrip(".") if message else ""
        return f"{words} ({code[1]})" if words else code[1]
    causes = [each.strip() for each in text.split(_LINK)]
    [*_, last] = [each for each in causes if each and not each.startswith("<")] or [""]
    return _QUERY.sub("", last)
