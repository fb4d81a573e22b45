"""Places in PostgreSQL's write-ahead log, as numbers and as text."""


def format_lsn(lsn: int) -> str:
    """An LSN as PostgreSQL writes it: 0/16B3748."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """The number behind PostgreSQL's text form of an LSN; ValueError when it is none."""
    high, _, low = text.partition("/")
    number = int(high, 16) << 32 | int(low, 16)
    if number >> 64 or int(low, 16) >> 32:
        raise ValueError(f"not an LSN: {text!r}")
    return number
