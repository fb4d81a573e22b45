"""A value that must not print."""

import re

MASK = "***"

_USER_INFO = re.compile(r"(?<=://)(?P<user>[^:@]*):.*(?=@)", re.DOTALL)
_URL_OR_PARAMETERS = re.compile(r"\s*(\w[\w+.-]*://|\w+\s*=)")
_PARAMETER = re.compile(
    r"(?P<name>\b\w*password\s*=\s*)(?P<value>'(?:[^'\\]|\\.)*'?|[^\s&]*)", re.IGNORECASE
)


class Secret:
    """A text that shows as `***` wherever it is printed, and is read with `reveal()`.

    Deliberately no dataclass and no Struct: neither `asdict` nor an encoder can open it.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The text itself."""
        return self._value

    def masked_url(self) -> str:
        """The text, taken as a URL or a list of `name=value`, without its passwords.

        What is neither shows nothing: a misspelt URL still holds its password.
        """
        if not _URL_OR_PARAMETERS.match(self._value):
            return MASK
        # Up to the last @: a password that was not percent-encoded may hold one itself.
        masked = _USER_INFO.sub(rf"\g<user>:{MASK}", self._value)
        return _PARAMETER.sub(rf"\g<name>{MASK}", masked)

    def __str__(self) -> str:
        return MASK

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))
