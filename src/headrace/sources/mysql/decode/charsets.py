"""Character sets of MySQL and MariaDB: collation numbers, and bytes -> text.

Text in a binlog is in the character set of its column. The tables here were compared, byte by
byte, with what a server makes of `CONVERT(… USING utf8mb4)`; where the servers differ from the
codec of nearly the same name, `_DIFFERENT` says how.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from functools import lru_cache

from ....errors import DecodeError

Decode = Callable[[bytes], str]

# Text in these is its own UTF-8.
UTF8 = frozenset(("utf8mb4", "utf8mb3", "utf8", "ascii"))

_CODECS = {
    "ascii": "ascii",
    "big5": "big5",
    "cp1250": "cp1250",
    "cp1251": "cp1251",
    "cp1256": "cp1256",
    "cp1257": "cp1257",
    "cp850": "cp850",
    "cp852": "cp852",
    "cp866": "cp866",
    "cp932": "cp932",
    "eucjpms": "euc_jp",
    "euckr": "cp949",
    "gb18030": "gb18030",
    "gb2312": "gb2312",
    "gbk": "gbk",
    "greek": "iso8859_7",
    "hebrew": "iso8859_8",
    "hp8": "hp_roman8",
    "koi8r": "koi8_r",
    "koi8u": "koi8_u",
    "latin1": "cp1252",
    "latin2": "iso8859_2",
    "latin5": "iso8859_9",
    "latin7": "iso8859_13",
    "macce": "mac_latin2",
    "macroman": "mac_roman",
    "sjis": "shift_jis",
    "tis620": "tis_620",
    "ucs2": "utf_16_be",
    "ujis": "euc_jp",
    "utf16": "utf_16_be",
    "utf16le": "utf_16_le",
    "utf32": "utf_32_be",
    "utf8": "utf_8",
    "utf8mb3": "utf_8",
    "utf8mb4": "utf_8",
}

# One character for each byte. The codec's own table, with these instead; bytes that Windows-1252
# leaves undefined are control characters in latin1.
_BYTES_DIFFERENT: Mapping[str, Mapping[int, str]] = {
    "latin1": {byte: chr(byte) for byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D)},
    "greek": {0xA1: "\u02bd", 0xA2: "\u02bc"},
    "hebrew": {0xAF: "\u203e"},
    "cp866": {0xFC: "\u207f", 0xFD: "\u00b2"},
    "koi8u": {0x95: "\u2022"},
}

# Several bytes a character: what the codec gives, and what the servers give instead.
_DIFFERENT = {
    "sjis": str.maketrans("\uff3c", "\\"),
    "ujis": str.maketrans("\uff3c", "\\"),
    "eucjpms": str.maketrans(
        "\u301c\u2016\u2212\u00a2\u00a3\u00ac", "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2"
    ),
}

_UNDEFINED = "\ufffe"  # what codecs.charmap_decode takes for no character
_C1 = "".join(map(chr, range(0x80, 0xA0)))
_LOWER = "".join(map(chr, range(0x80)))

# Character sets without a codec: 256 characters each.
_TABLES = {
    "dec8": _LOWER
    + _C1
    + "\xa0¡¢£\ufffe¥\ufffe§¤©ª«\ufffe\ufffe\ufffe\ufffe°±²³\ufffeµ¶·\ufffe¹º»¼½\ufffe¿"
    + "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏ\ufffeÑÒÓÔÕÖŒØÙÚÛÜŸ\ufffeßàáâãäåæçèéêëìíîï\ufffeñòóôõöœøùúûüÿ\ufffe\ufffe",
    "swe7": _LOWER[:0x7F].translate(str.maketrans("@[\\]^`{|}~", "ÉÄÖÅÜéäöåü")) + _UNDEFINED * 129,
    "armscii8": _LOWER
    + _C1
    + "\xa0\u2741§\u0589)(»«—.\u055d,-՟…՜՛՞ԱաԲբԳգԴդԵեԶզԷէԸըԹթԺժԻիԼլԽխԾծԿկՀհՁձ"
    + "ՂղՃճՄմՅյՆնՇշՈոՉչՊպՋջՌռՍսՎվՏտՐրՑցՒւ"
    + "ՓփՔքՕօՖֆ\u2019'",
    "keybcs2": _LOWER
    + "ČüéďäĎŤčěĚĹÍľĺÄÁÉžŽôöÓůÚýÖÜŠĽÝŘťáíóúňŇŮÔšřŕŔ¼¡«»"
    + "░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀"
    + "\u03b1ßΓπΣ\u03c3µτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\xa0",
    "geostd8": _LOWER
    + "€\ufffe\u201a\ufffe„…†‡\ufffe‰\ufffe\u2039\ufffe\ufffe\ufffe\ufffe\ufffe\u2018\u2019“”•–—"
    + "\ufffe\ufffe\ufffe\u203a\ufffe\ufffe\ufffe\ufffe\xa0¡¢£¤¥¦§¨©ª«¬\xad®¯°±²³\xb4µ¶·\xb8¹º»¼½¾¿"
    + "აბგდევზჱთიკლმნჲოპჟრსტჳუფქღყშჩცძწჭხჴჯჰჵ"
    + "\ufffe" * 23
    + "№\ufffe\ufffe",
}

# Numbers of collations, as ranges. MariaDB's collations without padding stand 1024 higher.
_COLLATIONS = {
    "armscii8": "32 64",
    "ascii": "11 65",
    "big5": "1 84",
    "binary": "63",
    "cp1250": "26 34 44 66 99",
    "cp1251": "14 23 50-52",
    "cp1256": "57 67",
    "cp1257": "29 58-59",
    "cp850": "4 80",
    "cp852": "40 81",
    "cp866": "36 68",
    "cp932": "95-96",
    "dec8": "3 69",
    "eucjpms": "97-98",
    "euckr": "19 85",
    "gb18030": "248-250",
    "gb2312": "24 86",
    "gbk": "28 87",
    "geostd8": "92-93",
    "greek": "25 70",
    "hebrew": "16 71",
    "hp8": "6 72",
    "keybcs2": "37 73",
    "koi8r": "7 74",
    "koi8u": "22 75",
    "latin1": "5 8 15 31 47-49 94",
    "latin2": "2 9 21 27 77",
    "latin5": "30 78",
    "latin7": "20 41-42 79",
    "macce": "38 43",
    "macroman": "39 53",
    "sjis": "13 88",
    "swe7": "10 82",
    "tis620": "18 89",
    "ucs2": "35 90 128-159 640-642 2560-2815",
    "ujis": "12 91",
    "utf16": "54-55 101-124 672-674 2816-3071",
    "utf16le": "56 62",
    "utf32": "60-61 160-183 736-738 3072-3327",
    "utf8mb3": "33 76 83 192-223 576-578 2048-2303",
    "utf8mb4": "45-46 224-247 255-323 608-610 2304-2559",
}


def _numbers(ranges: str) -> set[int]:
    every: set[int] = set()
    for part in ranges.split():
        first, _, last = part.partition("-")
        every.update(range(int(first), int(last or first) + 1))
    return every | {number + 1024 for number in every if number < 1024}


_CHARSET_OF = {
    number: charset for charset, ranges in _COLLATIONS.items() for number in _numbers(ranges)
}


def charset_of(collation: int) -> str:
    """The character set of a collation's number."""
    try:
        return _CHARSET_OF[collation]
    except KeyError:
        raise DecodeError(
            f"the server uses a collation of number {collation}, which is not known here",
            hint="Set binlog_row_metadata to MINIMAL, or convert the column to utf8mb4.",
        ) from None


@lru_cache
def decoder(charset: str) -> Decode:
    """The function that turns bytes of a character set into text; UnicodeError: it is not text."""
    if charset in _TABLES or charset in _BYTES_DIFFERENT:
        return _by_table(_TABLES.get(charset) or _changed_table(charset))
    codec = _CODECS.get(charset)
    if codec is None:
        raise DecodeError(
            f"a column has the character set {charset}, which is not known here",
            hint="Convert the column to utf8mb4.",
        )
    decode = codecs.lookup(codec).decode
    different = _DIFFERENT.get(charset)
    if different is None:
        return lambda value: decode(value)[0]
    return lambda value: decode(value)[0].translate(different)


def is_ascii_superset(charset: str) -> bool:
    """Whether bytes below 128 mean the same as in ASCII, and are never part of another character.

    In big5, gbk, sjis and their kin the second byte of a character may be below 128, so there only
    text that is ASCII alone is the same: test for that first.
    """
    return charset not in ("swe7", "ucs2", "utf16", "utf16le", "utf32", "binary")


def _changed_table(charset: str) -> str:
    different = _BYTES_DIFFERENT[charset]
    every = bytes(range(256))
    table = [
        codecs.decode(every[at : at + 1], _CODECS[charset], "replace").replace("\ufffd", _UNDEFINED)
        for at in range(256)
    ]
    return "".join(different.get(at, character) for at, character in enumerate(table))


def _by_table(table: str) -> Decode:
    decode = codecs.charmap_decode

    def read(value: bytes) -> str:
        return decode(value, "strict", table)[0]

    return read
