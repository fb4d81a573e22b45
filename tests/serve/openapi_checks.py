"""What Schemathesis is told of this server; its process loads this by SCHEMATHESIS_HOOKS."""

from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

LONGEST_MS = 60_000  # that a poll or a lease may wait

# Reasons to refuse what the schema allows, which no schema of a single value can tell.
UNSAYABLE = (
    "a sequence and a cursor both say where to begin",
    "preserve_transactions goes with format=savegress",
    "the newest in the log",  # a cursor cannot stand beyond it
    "is not printable",
    "a key with cdc:admin cannot be held",
    "a key must live for at least a second",
    "is too long a duration",
    "got `float`",  # JSON Schema calls 1.0 an integer
)


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Let nothing wait for changes that nobody makes; what is not valid stays as it is."""
    query = case.query
    for name in ("wait_ms", "long_poll_ms"):
        if _number(query.get(name)) <= LONGEST_MS:
            query[name] = 0
    if str(query.get("keep_alive")).lower() in ("true", "1"):
        query["keep_alive"] = "false"
    path = case.operation.path
    if path == "/v1/changes/stream" and (upto := _number(query.get("upto", 0))) < 1 << 64:
        query["upto"] = min(upto, 5)
    if path == "/v1/sources/{name}/snapshot" and str(case.path_parameters["name"]).isalnum():
        case.path_parameters["name"] = "shop"  # the one that there is


def _number(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 1 << 64


@schemathesis.check
def accepts_what_the_schema_allows(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """Schemathesis's own check, but for reasons that a schema cannot say."""
    if response.status_code != 400 or not any(words in response.text for words in UNSAYABLE):
        positive_data_acceptance(ctx, response, case)
