"""The annotation of a transaction, as the entity format shows it."""

from typing import NamedTuple

import msgspec

TRIGGERS = {
    "CREATE": ("api_create", "api_import", "batch_import", "admin_action", "data_migration"),
    "UPDATE": ("api_update", "api_delete", "admin_action"),  # a soft delete is an update
    "DELETE": ("api_delete", "admin_action", "cascade_delete"),
}
"""What may cause each operation."""

_FITTING = {
    trigger: frozenset(each for each, fitting in TRIGGERS.items() if trigger in fitting)
    for fitting in TRIGGERS.values()
    for trigger in fitting
}

_REQUEST = ("request_id", "user_id", "user_roles", "ip_address", "user_agent", "api_version")
_TEXTS = frozenset({*_REQUEST, "session_id", "user", "trigger", "annotation_error"}) - {
    "user_roles"
}
_LABELS = {name: b'"%b":' % name.encode() for name in _REQUEST}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_string = msgspec.json.Decoder(str).decode
_roles = msgspec.json.Decoder(tuple[str, ...]).decode
_encode = msgspec.json.Encoder().encode


class Annotation(NamedTuple):
    """Values are JSON; the members of an object stand without its braces."""

    root: str | None = None  # the entity that the transaction is about
    trigger: bytes = b""  # without quotes
    fitting: frozenset[str] = frozenset()  # the operations that it may have caused
    session_id: bytes = b"null"
    user: bytes | None = None
    request: bytes = b""  # members of `metadata` that come before the custom ones
    custom: bytes = b""  # members of `custom_fields`
    misfit: bytes = b""  # the same for operations that the trigger does not fit: it is one of them
    error: bytes | None = None
    annotation_error: str = ""  # what is wrong with the annotation itself


NO_ANNOTATION = Annotation()


def read(metadata: bytes | None) -> Annotation:
    """Decode an annotation; a field that the format does not know is a custom field."""
    if metadata is None:
        return NO_ANNOTATION
    known: dict[str, bytes] = {}
    custom: dict[str, bytes] = {}
    for name, raw in _fields(metadata).items():
        value = bytes(raw)
        if value.startswith(b'"') and name in _TEXTS:
            known[name] = value
        elif name in _TEXTS and not value.startswith((b"[", b"{", b"null")):
            known[name] = as_text(value)
        elif value != b"null":
            custom[name] = value
    if "user_roles" in custom and _are_roles(custom["user_roles"]):
        known["user_roles"] = custom.pop("user_roles")
    root, error = custom.pop("root", None), custom.pop("error", None)
    trigger = known.get("trigger")
    fitting = _FITTING.get(_string(trigger), frozenset()) if trigger else frozenset()
    return Annotation(
        root=None if root is None else _string(as_text(root)),
        trigger=trigger[1:-1] if trigger and fitting else b"",
        fitting=fitting,
        session_id=known.get("session_id", b"null"),
        user=known.get("user"),
        request=b",".join([_LABELS[name] + known[name] for name in _REQUEST if name in known]),
        error=error,
        annotation_error=_string(known["annotation_error"]) if "annotation_error" in known else "",
        custom=_members(custom),
        misfit=_members(custom | {"trigger": trigger} if trigger else custom),
    )


def as_text(value: bytes) -> bytes:
    """A JSON value as a JSON string; a number keeps its digits."""
    first = value[:1]
    if first == b'"':
        return value
    return _encode(str(value, "utf-8")) if first in b"[{" else b'"%b"' % value


def _are_roles(value: bytes) -> bool:
    try:
        _roles(value)
    except msgspec.DecodeError:
        return False
    return True


def _members(custom: dict[str, bytes]) -> bytes:
    own = custom.get("custom_fields", b"")
    fields: dict[str, msgspec.Raw] = {}
    if own.startswith(b"{"):
        fields = _fields(own)
        custom = {name: value for name, value in custom.items() if name != "custom_fields"}
    for name, value in custom.items():
        fields.setdefault(name, msgspec.Raw(value))
    return _encode(fields)[1:-1]
