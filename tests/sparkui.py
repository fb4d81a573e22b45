"""Spark's pages, as a browser would see them; no secret may be on one."""

import re
import urllib.error
import urllib.request
from collections import Counter

_LINK = re.compile(r"""(?:href|src)=["'](/[^"'#]*)""")
_BEGIN = ("jobs", "stages", "storage", "environment", "executors", "SQL", "StreamingQuery")
_MOST_OF_A_KIND = 30  # jobs, stages, plans …: after many batches there are hundreds


def pages(ui: str) -> dict[str, str]:
    """Spark's pages and those that they link to, of each kind some."""
    waiting = ["/", *(f"/{name}/" for name in _BEGIN), "/api/v1/applications"]
    found: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    while waiting:
        page = waiting.pop(0)
        # The same page in another order, and what ends a job.
        if page in found or page.startswith("/static") or "sort=" in page or "kill" in page:
            continue
        kind = page.partition("?")[0]
        kinds[kind] += 1
        if kinds[kind] > _MOST_OF_A_KIND:
            continue
        found[page] = _page(f"{ui}{page}")
        waiting += [link.replace("&amp;", "&") for link in _LINK.findall(found[page])]
    return found


def assert_hidden(found: dict[str, str], *secrets: str) -> None:
    """No page has one of these; and the pages with the plans are among them."""
    assert any("/SQL/execution" in page for page in found)
    assert any("/stages/stage" in page for page in found)
    assert any("/StreamingQuery/statistics" in page for page in found)
    assert any("MapInArrow" in text for text in found.values())
    for page, text in found.items():
        assert [each for each in secrets if each in text] == [], page


def _page(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError as error:
        with error:  # some links are for forms
            content = error.read()
    return content.decode(errors="replace")
