"""JSON kept on one line."""


def one_line(text: bytes) -> bytes:
    """The same JSON without line ends.

    A `json` column keeps the white space it was written with. Inside a JSON string a line end is
    always escaped, so a bare one is white space between tokens and may become a blank.
    """
    if b"\n" in text or b"\r" in text:
        return text.replace(b"\n", b" ").replace(b"\r", b" ")
    return text
