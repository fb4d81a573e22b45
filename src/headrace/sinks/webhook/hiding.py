"""What an answer may repeat and nobody may read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...secret import MASK, Secret

# Letters and digits come through every escape as they are: \/, \u003d, %3D, &amp;.
_WORD = re.compile(r"[^\W_]+")
_LONG = 4  # letters; what is shorter is hidden only where it stands alone
_TELLING = 6  # letters of a text that tell something of it when they are all that shows


class Hidden:
    """Texts of which no word shows, however it was escaped or cut off on its way."""

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
        return "Hidden()"

    def masked(self, text: str) -> str:
        """The text without them."""
        for secret in self._texts:
            text = text.replace(secret, MASK)
        return self._short.sub(MASK, _WORD.sub(self._mask, text))

    def _mask(self, found: re.Match[str]) -> str:
        word = found[0].lower()
        part = len(word) >= _TELLING and word in self._all
        return MASK if part or any(each in word for each in self._words) else found[0]
